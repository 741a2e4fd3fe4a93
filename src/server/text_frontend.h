#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// What a chat template is given.
struct ChatInput {
  const Json* messages = nullptr;            // an array of objects
  const Json* tools = nullptr;               // an array, or nullptr
  const Json* template_arguments = nullptr;  // an object of further variables, or nullptr
  bool add_generation_prompt = true;
};

/// Text to tokens and back, as the routes need it. Thread-safe.
class TextFrontend {
 public:
  virtual ~TextFrontend() = default;
  /// Renders the template and tokenizes its text. Errors: kInvalidArgument if the template refuses
  /// the messages, kUnsupported if the model has no template.
  [[nodiscard]] virtual Result<std::vector<int32_t>> encode_chat(const ChatInput& input) const = 0;
  /// With the tokens that the tokenizer puts before a prompt, if `add_special`.
  [[nodiscard]] virtual std::vector<int32_t> encode(std::string_view text,
                                                    bool add_special) const = 0;
  [[nodiscard]] virtual std::string decode(std::span<const int32_t> ids) const = 0;
  /// Bytes of one token, maybe a part of a character.
  [[nodiscard]] virtual std::string token_bytes(int32_t id) const = 0;
  [[nodiscard]] virtual bool is_special(int32_t id) const = 0;
};

}  // namespace nibble
