#pragma once

#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace nibble {
namespace jinja {
struct ParsedTemplate;
}

/// Whether the prompt ends with the opening of the assistant's turn.
enum class GenerationPrompt { kOmit, kAdd };

/// What a chat template sees.
struct ChatInputs {
  Json messages;              // array of messages
  std::optional<Json> tools;  // array of tool descriptions; absent: none
  GenerationPrompt generation_prompt = GenerationPrompt::kAdd;
  Json extra;  // null, or an object: enable_thinking, reasoning_effort, ...
  std::optional<std::string> bos_token;
  std::optional<std::string> eos_token;
  std::optional<std::tm> now;  // what strftime_now shows; absent: the local time
};

/// A Jinja2 chat template as model repositories ship them, rendered as the transformers library
/// does (trim_blocks, lstrip_blocks, loop controls, its tojson, raise_exception and strftime_now).
/// Immutable after parsing; rendering from several threads is safe.
class ChatTemplate final {
 public:
  /// `name` stands in error messages, for instance the file's path.
  /// Errors: kInvalidArgument with the line for syntax that Jinja2 refuses or that is not supported
  /// (extends, block, include, import).
  static Result<ChatTemplate> parse(std::string_view source, std::string name);

  /// The prompt. Errors: kInvalidArgument, with the template's own message when it refuses the
  /// conversation (raise_exception), else with the template's name and line; also when the work,
  /// depth or size limit of a render is passed (jinja::Limits).
  [[nodiscard]] Result<std::string> render(const ChatInputs& inputs) const;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& source() const { return source_; }

 private:
  ChatTemplate(std::shared_ptr<const jinja::ParsedTemplate> parsed,
               std::string name,
               std::string source)
      : parsed_(std::move(parsed)), name_(std::move(name)), source_(std::move(source)) {}

  std::shared_ptr<const jinja::ParsedTemplate> parsed_;
  std::string name_;
  std::string source_;
};

}  // namespace nibble
