#include "server/text_frontend.h"

#include <algorithm>
#include <utility>

namespace nibble {
TextFrontend::TextFrontend(std::shared_ptr<const Tokenizer> tokenizer,
                           std::optional<ChatTemplate> chat_template,
                           Status no_template)
    : tokenizer_(std::move(tokenizer)),
      template_(std::move(chat_template)),
      no_template_(std::move(no_template)) {
  for (int32_t id = 0; id < tokenizer_->vocab_size(); ++id) {
    longest_token_ = std::max(longest_token_, tokenizer_->token_bytes(id).size());
  }
}

Result<std::string> TextFrontend::render_chat(const ChatInput& input) const {
  if (!template_) {
    return make_error(StatusCode::kUnsupported,
                      "this model has no chat template ({}); use /v1/completions, or start the "
                      "server with --chat-template FILE",
                      no_template_.message());
  }
  ChatInputs values;
  values.messages = *input.messages;
  if (input.tools != nullptr) {
    values.tools = *input.tools;
  }
  if (input.template_arguments != nullptr) {
    values.extra = *input.template_arguments;
  }
  values.generation_prompt =
      input.add_generation_prompt ? GenerationPrompt::kAdd : GenerationPrompt::kOmit;
  values.bos_token = tokenizer_->bos_token();
  values.eos_token = tokenizer_->eos_token();
  return template_->render(values);
}

Result<std::vector<int32_t>> TextFrontend::encode(std::string_view text, bool add_special) const {
  return add_special ? tokenizer_->encode_prompt(text)
                     : tokenizer_->encode(text, SpecialTokens::kParse);
}

std::string TextFrontend::decode(std::span<const int32_t> ids) const {
  return tokenizer_->decode(ids, DecodeSpecials::kSkip);
}

}  // namespace nibble
