#include "server/text_frontend.h"

#include <algorithm>
#include <utility>

namespace nibble {
namespace {

/// Clients send the arguments of earlier calls as JSON text, and templates write them as JSON: what
/// is the text of an object becomes one. Whether there was any.
bool parse_arguments(Json& messages) {
  bool any = false;
  for (Json& message : messages.as_array()) {
    Json* calls = message.is_object() ? message.as_object().find("tool_calls") : nullptr;
    if (calls == nullptr || !calls->is_array()) {
      continue;
    }
    for (Json& call : calls->as_array()) {
      Json* function = call.is_object() ? call.as_object().find("function") : nullptr;
      const Json* text = function != nullptr ? function->find("arguments") : nullptr;
      Result<Json> object = text != nullptr && text->is_string()
                                ? Json::parse(text->as_string())
                                : make_error(StatusCode::kInvalidArgument, "no text");
      if (object.ok() && object->is_object()) {
        function->set("arguments", *std::move(object));
        any = true;
      }
    }
  }
  return any;
}

}  // namespace

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
  if (parse_arguments(values.messages)) {
    Result<std::string> text = template_->render(values);
    if (text.ok()) {
      return text;
    }
    values.messages = *input.messages;  // some templates (DeepSeek R1's) join texts themselves
  }
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
