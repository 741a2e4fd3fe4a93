#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/text_frontend.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace nibble {

/// The text frontend of a real model.
class TokenizerFrontend final : public TextFrontend {
 public:
  /// `no_template` says why `chat_template` is absent.
  TokenizerFrontend(std::shared_ptr<const Tokenizer> tokenizer,
                    std::optional<ChatTemplate> chat_template,
                    Status no_template);

  Result<std::vector<int32_t>> encode_chat(const ChatInput& input) const override;
  std::vector<int32_t> encode(std::string_view text, bool add_special) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  std::string token_bytes(int32_t id) const override;
  bool is_special(int32_t id) const override;

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::optional<ChatTemplate> template_;
  Status no_template_;
};

}  // namespace nibble
