#include "server/generation.h"

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "server/error.h"
#include "server/prompt.h"
#include "text/grammar/thought_gate.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

/// A job under way. Lives as long as the engine may report about it; all members belong to the
/// exchange's thread of control.
class Generation final : public std::enable_shared_from_this<Generation> {
 public:
  Generation(AppContext& context, std::shared_ptr<HttpExchange> exchange, GenerationJob job)
      : context_(context), exchange_(std::move(exchange)), job_(std::move(job)) {}

  void start();

 private:
  int64_t max_tokens(const std::vector<int32_t>& prompt) const;
  Status submit(Choice& choice);
  void on_event(size_t index, TokenEvent event);
  [[nodiscard]] AnswerStream::Options stream_options(const std::vector<int32_t>& prompt) const;
  std::vector<AnswerPiece> take_token(Choice& choice, const TokenEvent& event);
  void accept(Choice& choice, std::vector<AnswerPiece> pieces);
  void stream_pieces(Choice& choice, bool last);
  void end_choice(Choice& choice, FinishReason reason);
  void record(const Choice& choice, const std::string& reason);
  void fail(const ApiError& error);
  void cancel_all();
  void send_event(const Choice* choice, Json event);
  void complete();
  [[nodiscard]] Usage total_usage() const;
  [[nodiscard]] bool ends_answer(int32_t token) const;
  [[nodiscard]] bool thinks_already(const std::vector<int32_t>& prompt) const;

  AppContext& context_;
  std::shared_ptr<HttpExchange> exchange_;
  GenerationJob job_;
  std::vector<Choice> choices_;
  size_t running_ = 0;
  bool over_ = false;  // answered, failed or abandoned: events are ignored
  Clock::time_point started_ = Clock::now();
};

int64_t Generation::max_tokens(const std::vector<int32_t>& prompt) const {
  const int64_t room =
      context_.engine.options().max_model_len - static_cast<int64_t>(prompt.size());
  return job_.request.max_tokens.value_or(room);
}

void Generation::start() {
  AskedGrammar grammar = context_.grammars.find(job_.request, job_.form);
  if (const auto* error = std::get_if<ApiError>(&grammar)) {
    exchange_->respond(error_response(*error));
    return;
  }
  job_.grammar = std::move(std::get<std::shared_ptr<const Grammar>>(grammar));
  job_.request.tools = Json();  // the prompt and the grammar are made of them
  for (const auto& prompt : job_.prompts) {
    if (const auto error = check_prompt(context_, prompt, job_.request)) {
      exchange_->respond(error_response(*error));
      return;
    }
    for (int64_t i = 0; i < job_.request.n; ++i) {
      Choice& choice = choices_.emplace_back(context_.text.tokenizer(), stream_options(prompt));
      choice.index = static_cast<int64_t>(choices_.size()) - 1;
      choice.prompt = prompt;
    }
  }
  exchange_->on_disconnect([self = shared_from_this()] {
    self->cancel_all();
    for (const Choice& choice : self->choices_) {
      if (choice.finish_reason.empty()) {
        self->record(choice, "abort");
      }
    }
  });
  for (Choice& choice : choices_) {
    const Status status = submit(choice);
    if (!status.ok()) {
      fail(to_api_error(status));
      return;
    }
  }
  running_ = choices_.size();
  if (job_.request.stream) {
    exchange_->start_stream("text/event-stream; charset=utf-8");
    for (const Choice& choice : choices_) {
      send_event(&choice, job_.format->opening(choice));
    }
  }
}

bool Generation::thinks_already(const std::vector<int32_t>& prompt) const {
  constexpr size_t kTail = 16;  // tokens that hold the opening of a thought, and blanks
  const std::span<const int32_t> tail = std::span(prompt).last(std::min(prompt.size(), kTail));
  return ends_in_thought(context_.text.tokenizer().decode(tail, DecodeSpecials::kKeep),
                         job_.form.reasoning);
}

AnswerStream::Options Generation::stream_options(const std::vector<int32_t>& prompt) const {
  const GenerationRequest& asked = job_.request;
  AnswerForm form = job_.form;
  if (!asked.separate_reasoning && form.reasoning != ReasoningForm::kHarmony) {
    form.reasoning = ReasoningForm::kNone;
  }
  return {
      .parser = {.form = form,
                 .thinks_already = form.reasoning == job_.form.reasoning && thinks_already(prompt),
                 .functions = asked.functions},
      .stops = asked.stop,
      .stop_text = asked.include_stop ? StopText::kKeep : StopText::kOmit,
      .specials = asked.skip_special_tokens ? DecodeSpecials::kSkip : DecodeSpecials::kKeep};
}

Status Generation::submit(Choice& choice) {
  const GenerationRequest& asked = job_.request;
  Request request;
  request.id = fmt::format("{}-{}", exchange_->request().id, choice.index);
  request.prompt = choice.prompt;
  request.max_tokens = max_tokens(choice.prompt);
  request.min_tokens = asked.min_tokens;
  request.sampling = asked.sampling;
  if (request.sampling.seed) {
    *request.sampling.seed += static_cast<uint64_t>(choice.index % asked.n);
  }
  request.stop_tokens = asked.stop_token_ids;
  request.ignore_eos = asked.ignore_eos;
  request.top_logprobs = asked.logprobs;
  if (job_.grammar != nullptr) {
    request.constraint = after_thought(
        context_.text.tokenizer(), job_.form.reasoning,
        thinks_already(choice.prompt) ? ThoughtStart::kThinking : ThoughtStart::kMayThink,
        job_.grammar->start());
  }
  choice.cancelled = request.cancelled;
  choice.usage.prompt_tokens = static_cast<int64_t>(choice.prompt.size());
  request.on_event = [self = shared_from_this(),
                      index = static_cast<size_t>(choice.index)](TokenEvent event) {
    self->exchange_->post([self, index, event = std::move(event)]() mutable {
      self->on_event(index, std::move(event));
    });
  };
  return context_.engine.submit(std::move(request));
}

bool Generation::ends_answer(int32_t token) const {
  const auto& stops = job_.request.stop_token_ids;
  const auto& ends = context_.engine.model_config().eos_token_ids;
  return std::find(stops.begin(), stops.end(), token) != stops.end() ||
         std::find(ends.begin(), ends.end(), token) != ends.end();
}

/// Counts a token and returns what it makes certain.
std::vector<AnswerPiece> Generation::take_token(Choice& choice, const TokenEvent& event) {
  const auto now = Clock::now();
  if (choice.usage.completion_tokens == 0) {
    choice.first_token = now;
  } else {
    context_.metrics.record_inter_token(seconds_between(choice.last_token, now));
  }
  choice.last_token = now;
  ++choice.usage.completion_tokens;
  const bool thought = choice.text.thinks();
  const bool final_stop =
      event.finish == FinishReason::kStop && ends_answer(event.token) && !job_.request.include_stop;
  if (job_.request.logprobs >= 0 && !final_stop) {
    choice.entries.push_back({event, count_characters(choice.answer)});
  }
  std::vector<AnswerPiece> pieces;
  if (!final_stop) {
    pieces = choice.text.push(event.token);
  }
  choice.usage.reasoning_tokens += thought && choice.text.thinks() ? 1 : 0;  // without its marks
  return pieces;
}

/// Adds pieces to the answer, and to what is to be streamed, as far as the request wants them.
void Generation::accept(Choice& choice, std::vector<AnswerPiece> pieces) {
  using Kind = AnswerPiece::Kind;
  const GenerationRequest& asked = job_.request;
  for (AnswerPiece& piece : pieces) {
    const bool of_call = piece.kind != Kind::kReasoning && piece.kind != Kind::kContent;
    if (piece.kind == Kind::kCallBegin) {
      ++choice.seen_calls;
    }
    if ((of_call && !asked.parallel_tool_calls && choice.seen_calls > 1) ||
        (piece.kind == Kind::kReasoning && !asked.include_reasoning)) {
      continue;
    }
    if (piece.kind == Kind::kContent) {
      choice.answer += piece.text;
    } else if (piece.kind == Kind::kReasoning) {
      choice.reasoning += piece.text;
    } else if (piece.kind == Kind::kCallBegin) {
      piece.id = piece.id.empty() ? "call_" + random_id() : piece.id;
      choice.calls.push_back({piece.text, "", piece.id});
    } else if (piece.kind == Kind::kArguments) {
      choice.calls.back().arguments += piece.text;
    }
    if (asked.stream) {
      choice.unsent.push_back(std::move(piece));
    }
  }
}

void Generation::on_event(size_t index, TokenEvent event) {
  Choice& choice = choices_[index];
  choice.usage.cached_tokens = std::max(choice.usage.cached_tokens, event.cached_tokens);
  choice.queue_seconds = event.queue_seconds;
  if (over_ || !choice.finish_reason.empty()) {
    return;
  }
  if (event.finish == FinishReason::kError) {
    fail({500, event.failure.message(), "", ""});
    return;
  }
  if (event.finish == FinishReason::kCancelled) {  // by us only when over_: so by a shutdown
    fail({503, "the server is shutting down", "", ""});
    return;
  }
  if (event.token >= 0) {
    accept(choice, take_token(choice, event));
  }
  if (choice.text.stopped()) {
    choice.cancelled->store(true);
    event.finish = FinishReason::kStop;
  }
  if (event.finish != FinishReason::kNone) {
    accept(choice, choice.text.finish());
  }
  if (job_.request.stream) {
    stream_pieces(choice, event.finish != FinishReason::kNone);
  }
  if (event.finish != FinishReason::kNone) {
    end_choice(choice, event.finish);
  }
}

/// Sends what there is when it is the first, the last, or there is enough of it.
void Generation::stream_pieces(Choice& choice, bool last) {
  ++choice.unsent_tokens;
  const bool due = last || choice.usage.completion_tokens == 1 ||
                   choice.unsent_tokens >= context_.options.stream_interval;
  if (!due || choice.unsent.empty()) {
    return;
  }
  for (const AnswerPiece& piece : joined_pieces(std::exchange(choice.unsent, {}))) {
    choice.sent_calls += piece.kind == AnswerPiece::Kind::kCallBegin ? 1 : 0;
    Json event = job_.format->delta(choice, piece, choice.sent_calls - 1);
    if (!event.is_null()) {
      send_event(&choice, std::move(event));
      choice.entries.clear();
    }
  }
  choice.unsent_tokens = 0;
}

void Generation::end_choice(Choice& choice, FinishReason reason) {
  choice.finish_reason = reason == FinishReason::kLength ? "length"
                         : choice.calls.empty()          ? "stop"
                                                         : "tool_calls";
  record(choice, choice.finish_reason);
  if (job_.request.stream) {
    send_event(&choice, job_.format->end(choice));
    choice.entries.clear();
  }
  if (--running_ == 0) {
    complete();
  }
}

void Generation::record(const Choice& choice, const std::string& reason) {
  const auto now = Clock::now();
  context_.metrics.record({.finish_reason = reason,
                           .prompt_tokens = choice.usage.prompt_tokens,
                           .generated_tokens = choice.usage.completion_tokens,
                           .cached_tokens = choice.usage.cached_tokens,
                           .max_tokens = max_tokens(choice.prompt),
                           .num_choices = job_.request.n,
                           .queue = choice.queue_seconds,
                           .time_to_first_token = seconds_between(started_, choice.first_token),
                           .end_to_end = seconds_between(started_, now)});
}

Usage Generation::total_usage() const {
  Usage total;
  for (const Choice& choice : choices_) {
    if (choice.index % job_.request.n == 0) {  // a prompt counts once, however many answers
      total.prompt_tokens += choice.usage.prompt_tokens;
      total.cached_tokens += choice.usage.cached_tokens;
    }
    total.completion_tokens += choice.usage.completion_tokens;
    total.reasoning_tokens += choice.usage.reasoning_tokens;
  }
  return total;
}

void Generation::send_event(const Choice* choice, Json event) {
  if (event.is_null()) {
    return;
  }
  if (choice != nullptr && job_.request.continuous_usage) {
    event.set("usage", usage_json(choice->usage));
  } else if (choice == nullptr) {
    event.set("usage", usage_json(total_usage()));
  } else if (job_.request.include_usage) {
    event.set("usage", Json());
  }
  exchange_->write("data: " + event.dump() + "\n\n");
}

void Generation::complete() {
  over_ = true;
  if (job_.request.stream) {
    if (job_.request.include_usage) {
      send_event(nullptr, job_.format->usage_only());
    }
    exchange_->write("data: [DONE]\n\n");
    exchange_->finish();
    return;
  }
  Json answer = job_.format->whole(choices_);
  answer.set("usage", usage_json(total_usage()));
  exchange_->respond({.status = 200, .body = answer.dump()});
}

void Generation::cancel_all() {
  over_ = true;
  for (const Choice& choice : choices_) {
    if (choice.cancelled) {
      choice.cancelled->store(true);
    }
  }
}

void Generation::fail(const ApiError& error) {
  cancel_all();
  for (const Choice& choice : choices_) {
    if (choice.finish_reason.empty()) {
      record(choice, "error");
    }
  }
  if (exchange_->started()) {
    exchange_->write("data: " + error_json(error) + "\n\ndata: [DONE]\n\n");
    exchange_->finish();
  } else {
    exchange_->respond(error_response(error));
  }
}

}  // namespace

Json usage_json(const Usage& usage) {
  return Json::object(
      {{"prompt_tokens", usage.prompt_tokens},
       {"completion_tokens", usage.completion_tokens},
       {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
       {"prompt_tokens_details", Json::object({{"cached_tokens", usage.cached_tokens}})},
       {"completion_tokens_details",
        Json::object({{"reasoning_tokens", usage.reasoning_tokens}})}});
}

void run_generation(AppContext& context,
                    const std::shared_ptr<HttpExchange>& exchange,
                    GenerationJob job) {
  std::make_shared<Generation>(context, exchange, std::move(job))->start();
}

}  // namespace nibble
