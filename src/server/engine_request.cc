#include "server/engine_request.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "server/prompt.h"
#include "text/grammar/thought_budget.h"
#include "text/grammar/thought_gate.h"

namespace nibble {
namespace {

bool thinks_already(const AppContext& context,
                    const GenerationJob& job,
                    const std::vector<int32_t>& prompt) {
  constexpr size_t kTail = 16;  // tokens that hold the opening of a thought, and blanks
  const std::span<const int32_t> tail = std::span(prompt).last(std::min(prompt.size(), kTail));
  return ends_in_thought(context.text.tokenizer().decode(tail, DecodeSpecials::kKeep),
                         job.form.reasoning);
}

std::optional<ApiError> check_thought_tokens(const GenerationJob& job) {
  constexpr const char* kField = "thinking_token_budget";
  if (!job.request.thought_tokens) {
    return std::nullopt;
  }
  if (!thought_marks(job.form.reasoning)) {
    return ApiError{400,
                    "thinking_token_budget: this model's answers have no marked thoughts; use "
                    "max_tokens to bound them",
                    kField, ""};
  }
  if (!job.request.sampling.allowed_tokens.empty()) {
    return ApiError{400,
                    "thinking_token_budget: beside allowed_token_ids a thought might not end; keep "
                    "one of them",
                    kField, ""};
  }
  return std::nullopt;
}

/// What the tokens of an answer must obey; null if there is nothing.
Result<std::unique_ptr<TokenConstraint>> constraint_of(const AppContext& context,
                                                       const GenerationJob& job,
                                                       const std::vector<int32_t>& prompt) {
  std::unique_ptr<TokenConstraint> out;
  if (job.grammar == nullptr && !job.request.thought_tokens) {
    return out;
  }
  const Tokenizer& tokenizer = context.text.tokenizer();
  const ReasoningForm form = job.form.reasoning;
  const ThoughtStart start =
      thinks_already(context, job, prompt) ? ThoughtStart::kThinking : ThoughtStart::kMayThink;
  if (job.grammar != nullptr) {
    out = after_thought(tokenizer, form, start, job.grammar->start());
  }
  if (!job.request.thought_tokens) {
    return out;
  }
  const ThoughtMarks marks = thought_marks(form).value();  // else prepare_job() has refused it
  return limited_thought({tokenizer, marks, *job.request.thought_tokens}, start, std::move(out));
}

/// Where the model marks no calls, nothing can hold those to a schema that it makes if it likes.
std::optional<ApiError> ignore_strict(const AppContext& context, GenerationJob& job) {
  GenerationRequest& request = job.request;
  if (request.calls.required || request.form.kind != AskedForm::Kind::kFree ||
      marks_calls(job.form.tools) || !has_strict_tools(request)) {
    return std::nullopt;
  }
  constexpr std::string_view kField = "tools[].function.strict";
  if (context.options.schema.strictness == Strictness::kStrict) {
    return ApiError{400,
                    fmt::format("{}: this model does not mark its calls, so they are held to a "
                                "schema only with tool_choice required or a function's name",
                                kField),
                    std::string(kField), ""};
  }
  request.ignored.add(kField);
  return std::nullopt;
}

/// The form of an answer says where it ends.
std::optional<ApiError> ignore_ignored_end(const AppContext& context, GenerationRequest& request) {
  const bool has_form = request.calls.required || request.form.kind != AskedForm::Kind::kFree;
  if (!has_form || !request.ignore_eos) {
    return std::nullopt;
  }
  constexpr std::string_view kField = "ignore_eos";
  if (context.options.schema.strictness == Strictness::kStrict) {
    return ApiError{400,
                    fmt::format("{}: an answer of a given form ends where the form does; leave it "
                                "out",
                                kField),
                    std::string(kField), ""};
  }
  request.ignore_eos = false;
  request.ignored.add(kField);
  return std::nullopt;
}

}  // namespace

std::optional<ApiError> prepare_job(const AppContext& context, GenerationJob& job) {
  auto words = bad_word_tokens(context, job.request);
  if (const auto* error = std::get_if<ApiError>(&words)) {
    return *error;
  }
  job.bad_words = std::get<0>(std::move(words));
  if (auto error = check_thought_tokens(job)) {
    return error;
  }
  if (auto error = ignore_ignored_end(context, job.request)) {
    return error;
  }
  return ignore_strict(context, job);
}

AnswerStream::Options stream_options(const AppContext& context,
                                     const GenerationJob& job,
                                     const std::vector<int32_t>& prompt) {
  const GenerationRequest& asked = job.request;
  AnswerForm form = job.form;
  if (!asked.separate_reasoning && form.reasoning != ReasoningForm::kHarmony) {
    form.reasoning = ReasoningForm::kNone;
  }
  const bool thinks = form.reasoning == job.form.reasoning && thinks_already(context, job, prompt);
  return {.parser = {.form = form, .thinks_already = thinks, .functions = asked.functions},
          .stops = asked.stop,
          .stop_text = asked.include_stop ? StopText::kKeep : StopText::kOmit,
          .specials = asked.skip_special_tokens ? DecodeSpecials::kSkip : DecodeSpecials::kKeep};
}

int64_t max_tokens(const AppContext& context,
                   const GenerationJob& job,
                   const std::vector<int32_t>& prompt) {
  const int64_t room = context.engine.options().max_model_len - static_cast<int64_t>(prompt.size());
  return job.request.max_tokens.value_or(room);
}

Result<Request> engine_request(const AppContext& context,
                               const GenerationJob& job,
                               const Choice& choice) {
  const GenerationRequest& asked = job.request;
  Request request;
  request.prompt = choice.prompt;
  request.max_tokens = max_tokens(context, job, choice.prompt);
  request.min_tokens = asked.min_tokens;
  request.sampling = asked.sampling;
  if (request.sampling.seed) {
    *request.sampling.seed += static_cast<uint64_t>(choice.index % asked.n);
  }
  request.stop_tokens = asked.stop_token_ids;
  request.bad_words = job.bad_words;
  request.priority = asked.priority;
  request.cache_salt = asked.cache_salt;
  request.ignore_eos = asked.ignore_eos;
  request.top_logprobs = asked.logprobs;
  request.prompt_logprobs =
      std::max(asked.prompt_logprobs, asked.echo ? asked.logprobs : asked.prompt_logprobs);
  NIBBLE_ASSIGN_OR_RETURN(request.constraint, constraint_of(context, job, choice.prompt));
  request.cancelled = choice.cancelled;
  set_deadline(context, asked.timeout_s, request);
  return request;
}

void set_client(const AppContext& context, const HttpRequest& http, Request& request) {
  if (const auto place = key_place(context.options.api_keys, http)) {
    request.client = static_cast<int64_t>(*place);
    request.share = context.options.api_keys[*place].share;
  }
}

std::string key_name(const AppContext& context, const HttpRequest& http) {
  const auto place = key_place(context.options.api_keys, http);
  return place ? context.options.api_keys[*place].name : "";
}

ApiError too_late(const Status& why) { return {504, why.message(), "", "deadline_exceeded"}; }

void set_deadline(const AppContext& context, std::optional<double> timeout_s, Request& request) {
  const double most = context.options.request_timeout_s;
  const double limit = most > 0 ? std::min(timeout_s.value_or(most), most) : timeout_s.value_or(0);
  if (limit > 0) {
    request.deadline =
        request.made + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                           std::chrono::duration<double>(limit));
  }
}

}  // namespace nibble
