#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace nibble {

/// What a chat template is given.
struct ChatInput {
  const Json* messages = nullptr;            // an array of objects
  const Json* tools = nullptr;               // an array, or nullptr
  const Json* template_arguments = nullptr;  // an object of further variables, or nullptr
  bool add_generation_prompt = true;
};

/// Prompts of requests to tokens, as the routes need it. Immutable and thread-safe.
class TextFrontend final {
 public:
  /// `no_template` says why `chat_template` is absent.
  TextFrontend(std::shared_ptr<const Tokenizer> tokenizer,
               std::optional<ChatTemplate> chat_template,
               Status no_template);

  /// The prompt of a chat as text. Errors: kInvalidArgument if the template refuses the messages,
  /// kUnsupported if the model has no template.
  [[nodiscard]] Result<std::string> render_chat(const ChatInput& input) const;
  /// With the tokens that the tokenizer puts before a prompt, if `add_special`.
  /// Errors: those of Tokenizer::encode.
  [[nodiscard]] Result<std::vector<int32_t>> encode(std::string_view text, bool add_special) const;
  [[nodiscard]] std::string decode(std::span<const int32_t> ids) const;
  [[nodiscard]] const Tokenizer& tokenizer() const { return *tokenizer_; }
  /// Bytes of the longest token.
  [[nodiscard]] size_t longest_token() const { return longest_token_; }

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::optional<ChatTemplate> template_;
  Status no_template_;
  size_t longest_token_ = 1;
};

}  // namespace nibble
