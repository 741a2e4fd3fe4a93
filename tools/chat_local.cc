#include <algorithm>

#include "answer.h"
#include "chat_partner.h"
#include "text/answer/answer_form.h"

namespace nibble {
namespace {

constexpr double kTemperature = 0.7;

std::optional<std::string> optional_text(const std::string& text) {
  return text.empty() ? std::nullopt : std::optional(text);
}

class LocalPartner final : public ChatPartner {
 public:
  LocalPartner(ServingSession session, ChatForm form)
      : session_(std::move(session)),
        chats_(form == ChatForm::kAsModel && session_.chat_template.has_value()) {
    if (chats_) {
      form_ = detect_answer_form(*session_.tokenizer, session_.chat_template->source());
    }
  }

  [[nodiscard]] std::string title() const override {
    return fmt::format("{} ({})", session_.model_name, session_.scheme);
  }
  [[nodiscard]] bool chats() const override { return chats_; }

  Result<ChatReply> reply(const ChatTurn& turn, const ChatSinks& sinks) override {
    AnswerRequest request;
    ChatReply out;
    NIBBLE_ASSIGN_OR_RETURN(const std::string prompt, prompt_of(turn));
    const Tokenizer& tokenizer = *session_.tokenizer;
    if (chats_) {
      NIBBLE_ASSIGN_OR_RETURN(request.prompt, tokenizer.encode(prompt, SpecialTokens::kParse));
    } else {
      NIBBLE_ASSIGN_OR_RETURN(request.prompt, tokenizer.encode_prompt(prompt));
    }
    NIBBLE_RETURN_IF_ERROR(fit(request.prompt, turn.settings, out));
    request.max_tokens = turn.settings.max_tokens;
    request.sampling = sampling_of(turn.settings, session_.config, kTemperature);
    request.stop = turn.settings.stop;
    request.on_text = sinks.on_text;
    request.on_reasoning = sinks.on_reasoning;
    request.parts = {.form = form_,
                     .thinks_already = ends_in_thought(prompt, form_.reasoning),
                     .functions = {},
                     .tokens = DecodeSpecials::kSkip};
    request.interrupt_fd = turn.interrupts.fd();
    NIBBLE_ASSIGN_OR_RETURN(Answer answer, ask(session_, std::move(request)));
    out.text = std::move(answer.text);
    out.finish_reason = std::move(answer.finish_reason);
    out.tokens = std::ssize(answer.tokens);
    out.ttft_ms = answer.ttft_ms;
    out.seconds = answer.tpot_ms * static_cast<double>(std::max<int64_t>(out.tokens - 1, 0)) / 1000;
    return out;
  }

 private:
  Result<std::string> prompt_of(const ChatTurn& turn) const {
    if (!chats_) {
      return turn.text;
    }
    return session_.chat_template->render(
        {.messages = turn.messages,
         .generation_prompt = GenerationPrompt::kAdd,
         .bos_token = optional_text(session_.tokenizer->bos_token()),
         .eos_token = optional_text(session_.tokenizer->eos_token())});
  }
  // Sees to it that there is room for an answer: a quarter of the context, or less if less is asked
  // for. Text slides; of messages the caller decides what is left out.
  Status fit(std::vector<int32_t>& prompt, const AnswerFlags& settings, ChatReply& reply) const {
    const int64_t context = session_.engine->options().max_model_len;
    const int64_t room = std::clamp<int64_t>(context / 4, 1, settings.max_tokens);
    if (std::ssize(prompt) + room <= context) {
      return {};
    }
    if (chats_) {
      return make_error(StatusCode::kResourceExhausted,
                        "it has {} tokens, and the context of {} shall leave {} for the answer",
                        prompt.size(), context, room);
    }
    reply.cut = true;
    const int64_t prefix = std::ssize(session_.tokenizer->prompt_prefix());
    const int64_t keep = std::max<int64_t>(context - room - prefix, 1);
    prompt.erase(prompt.begin() + prefix, prompt.end() - keep);
    return {};
  }

  ServingSession session_;
  bool chats_;
  AnswerForm form_;
};

}  // namespace

Result<std::unique_ptr<ChatPartner>> open_local_partner(const ModelFlags& flags, ChatForm form) {
  NIBBLE_ASSIGN_OR_RETURN(ServingSession session, open_session(flags));
  // A template that is there and cannot be used is an error; a missing one makes a base model.
  if (!session.chat_template && session.no_template.code() != StatusCode::kNotFound &&
      form == ChatForm::kAsModel) {
    return session.no_template;
  }
  return std::unique_ptr<ChatPartner>(std::make_unique<LocalPartner>(std::move(session), form));
}

}  // namespace nibble
