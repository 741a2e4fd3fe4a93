#include "server/tokenizer_frontend.h"

namespace nibble {

TokenizerFrontend::TokenizerFrontend(std::shared_ptr<const Tokenizer> tokenizer,
                                     std::optional<ChatTemplate> chat_template,
                                     Status no_template)
    : tokenizer_(std::move(tokenizer)),
      template_(std::move(chat_template)),
      no_template_(std::move(no_template)) {}

Result<std::vector<int32_t>> TokenizerFrontend::encode_chat(const ChatInput& input) const {
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
  NIBBLE_ASSIGN_OR_RETURN(const std::string prompt, template_->render(values));
  return tokenizer_->encode(prompt, SpecialTokens::kParse);
}

std::vector<int32_t> TokenizerFrontend::encode(std::string_view text, bool add_special) const {
  return add_special ? tokenizer_->encode_prompt(text)
                     : tokenizer_->encode(text, SpecialTokens::kParse);
}

std::string TokenizerFrontend::decode(std::span<const int32_t> ids) const {
  return tokenizer_->decode(ids, DecodeSpecials::kSkip);
}

std::string TokenizerFrontend::token_bytes(int32_t id) const { return tokenizer_->token_bytes(id); }

bool TokenizerFrontend::is_special(int32_t id) const { return tokenizer_->is_special(id); }

}  // namespace nibble
