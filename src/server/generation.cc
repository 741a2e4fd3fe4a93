#include "server/generation.h"

#include <algorithm>
#include <future>
#include <utility>

#include <fmt/format.h>

#include "server/engine_request.h"
#include "server/error.h"
#include "server/prompt.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// A job under way. Lives as long as the engine may report about it; all members belong to the
/// exchange's thread of control.
class Generation final : public std::enable_shared_from_this<Generation> {
 public:
  Generation(AppContext& context, std::shared_ptr<HttpExchange> exchange, GenerationJob job)
      : context_(context), exchange_(std::move(exchange)), job_(std::move(job)) {}

  void start();

 private:
  Status submit(Choice& choice);
  void on_event(size_t index, TokenEvent event);
  std::vector<AnswerPiece> take_token(Choice& choice, const TokenEvent& event);
  void accept(Choice& choice, std::vector<AnswerPiece> pieces);
  void open(Choice& choice);
  void stream_pieces(Choice& choice, bool last);
  void end_choice(Choice& choice, FinishReason reason);
  void record(const Choice& choice, const std::string& reason);
  void fail(const ApiError& error);
  void cancel_all();
  void find_grammar();
  void take_grammar(AskedGrammar grammar);
  void begin();
  void complete();
  [[nodiscard]] Usage total_usage() const;
  /// Whether the prompt is shown as a part of the text, with its log probabilities.
  [[nodiscard]] bool scores_echo() const { return job_.request.echo && job_.request.logprobs >= 0; }
  [[nodiscard]] bool ends_answer(int32_t token) const;

  AppContext& context_;
  std::shared_ptr<HttpExchange> exchange_;
  GenerationJob job_;
  std::vector<Choice> choices_;
  size_t running_ = 0;
  std::unique_ptr<RunningAnswers::Entry> entry_;
  bool over_ = false;  // answered, failed or abandoned: events are ignored
  Clock::time_point started_ = Clock::now();
};

/// Finds the grammar of the answers, now or, where it has to be made, on a thread that does so.
void Generation::find_grammar() {
  if (auto known = context_.grammars.find(job_.request, job_.form, Effort::kLookUp)) {
    take_grammar(*std::move(known));
    return;
  }
  using Task = std::packaged_task<AskedGrammar()>;  // which keeps what is thrown for take_grammar()
  const auto task = std::make_shared<Task>([self = shared_from_this()] {
    return self->context_.grammars.find(self->job_.request, self->job_.form, Effort::kMake).value();
  });
  const bool taken = context_.grammar_thread.post([self = shared_from_this(), task] {
    (*task)();
    self->exchange_->post([self, task] { self->take_grammar(task->get_future().get()); });
  });
  if (!taken) {
    refuse(*exchange_, {429, "too many new forms are being prepared; try again later", "",
                        "rate_limit_exceeded"});
  }
}

void Generation::take_grammar(AskedGrammar grammar) {
  if (const auto* error = std::get_if<ApiError>(&grammar)) {
    refuse(*exchange_, renamed(*error, job_.names));
    return;
  }
  job_.grammar = std::move(std::get<std::shared_ptr<const Grammar>>(grammar));
  job_.request.tools = Json();  // the prompt and the grammar are made of them
  begin();
}

void Generation::start() {
  if (const auto error = prepare_job(context_, job_)) {
    refuse(*exchange_, renamed(*error, job_.names));
    return;
  }
  find_grammar();
}

void Generation::begin() {
  for (auto& prompt : job_.prompts) {
    const int64_t answer = job_.request.max_tokens.value_or(1);
    truncate_prompt(context_, job_.request.truncate_prompt_tokens, answer, prompt);
    if (const auto error = check_prompt(context_, prompt, answer, prompt_field(job_.request))) {
      refuse(*exchange_, renamed(*error, job_.names));
      return;
    }
    for (int64_t i = 0; i < job_.request.n; ++i) {
      Choice& choice =
          choices_.emplace_back(context_.text.tokenizer(), stream_options(context_, job_, prompt));
      choice.index = static_cast<int64_t>(choices_.size()) - 1;
      choice.prompt = prompt;
      if (scores_echo()) {
        choice.text_start = utf8_length(context_.text.decode(prompt));
      }
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
  if (over_) {  // it went away while the grammar was made
    return;
  }
  RunningAnswers::Flags flags;
  for (Choice& choice : choices_) {
    flags.push_back(choice.cancelled = std::make_shared<std::atomic<bool>>(false));
  }
  entry_ = std::make_unique<RunningAnswers::Entry>(
      context_.running, job_.id.empty() ? exchange_->request().id : job_.id, std::move(flags));
  for (Choice& choice : choices_) {
    const Status status = submit(choice);
    if (!status.ok()) {
      fail(to_api_error(status));
      return;
    }
  }
  running_ = choices_.size();
  context_.metrics.record_ignored(job_.request.ignored);
  if (job_.request.stream) {
    exchange_->start_stream("text/event-stream; charset=utf-8",
                            warning_headers(job_.request.ignored));
    for (size_t i = 0; i < choices_.size() && job_.format->begins_at_once(); ++i) {
      open(choices_[i]);
    }
  }
}

void Generation::open(Choice& choice) {
  choice.opened = true;
  exchange_->write(job_.format->stream_begin(choice));
}

Status Generation::submit(Choice& choice) {
  NIBBLE_ASSIGN_OR_RETURN(Request request, engine_request(context_, job_, choice));
  request.id = fmt::format("{}-{}", exchange_->request().id, choice.index);
  set_client(context_, exchange_->request(), request);
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
  choice.tokens.push_back(event.token);
  const bool thought = choice.text.thinks();
  const bool final_stop =
      event.finish == FinishReason::kStop && ends_answer(event.token) && !job_.request.include_stop;
  // Clients that score an echo cut the answer off by its number of tokens, the end token too.
  if (job_.request.logprobs >= 0 && (!final_stop || scores_echo())) {
    choice.entries.push_back({event, choice.text_start + utf8_length(choice.answer)});
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
    append_piece(choice.unsent, std::move(piece));
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
    const bool asked = event.failure.code() == StatusCode::kInvalidArgument;  // by what was sent
    fail({asked ? 400 : 500, event.failure.message(), "", ""});
    return;
  }
  if (event.finish == FinishReason::kTimeout && !event.failure.ok()) {
    fail(too_late(event.failure));
    return;
  }
  // By us only when over_, or when it was ended by another request: so by a shutdown.
  if (event.finish == FinishReason::kCancelled && !entry_->ended()) {
    fail({503, "the server is shutting down", "", ""});
    return;
  }
  if (!event.prompt_logprobs.empty()) {
    choice.prompt_logprobs = std::move(event.prompt_logprobs);
  }
  if (job_.request.stream && !choice.opened) {
    open(choice);
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
  for (const AnswerPiece& piece : std::exchange(choice.unsent, {})) {
    choice.sent_calls += piece.kind == AnswerPiece::Kind::kCallBegin ? 1 : 0;
    const std::string event = job_.format->stream_piece(choice, piece, choice.sent_calls - 1);
    if (!event.empty()) {
      exchange_->write(event);
      choice.entries.clear();
    }
  }
  choice.unsent_tokens = 0;
}

void Generation::end_choice(Choice& choice, FinishReason reason) {
  choice.timed_out = reason == FinishReason::kTimeout;
  if (reason == FinishReason::kLength || choice.timed_out) {
    choice.finish_reason = "length";
  } else if (reason == FinishReason::kCancelled) {
    choice.finish_reason = "abort";
  } else {
    choice.finish_reason = choice.calls.empty() ? "stop" : "tool_calls";
  }
  record(choice, choice.timed_out ? kTimeoutReason : choice.finish_reason);
  if (job_.request.stream) {
    exchange_->write(job_.format->stream_choice_end(choice));
    choice.entries.clear();
  }
  if (--running_ == 0) {
    complete();
  }
}

void Generation::record(const Choice& choice, const std::string& reason) {
  const auto now = Clock::now();
  context_.metrics.record({.finish_reason = reason,
                           .key_name = key_name(context_, exchange_->request()),
                           .prompt_tokens = choice.usage.prompt_tokens,
                           .generated_tokens = choice.usage.completion_tokens,
                           .cached_tokens = choice.usage.cached_tokens,
                           .max_tokens = max_tokens(context_, job_, choice.prompt),
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

void Generation::complete() {
  over_ = true;
  if (job_.request.stream) {
    exchange_->write(job_.format->stream_end(total_usage()));
    exchange_->finish();
    return;
  }
  exchange_->respond({.status = 200,
                      .headers = warning_headers(job_.request.ignored),
                      .body = job_.format->whole_body(choices_, total_usage())});
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
    exchange_->write(job_.format->stream_failure(error));
    exchange_->finish();
  } else {
    refuse(*exchange_, error);
  }
}

}  // namespace

std::optional<ApiError> prepare_chat(const AppContext& context, GenerationJob& job) {
  if (auto error = check_model(context, job.request.model)) {
    return error;
  }
  if (auto error = check_request(context, job.request, 1)) {
    return error;
  }
  PromptTokens prompt = chat_prompt(context, job.request);
  if (const auto* error = std::get_if<ApiError>(&prompt)) {
    return *error;
  }
  job.prompts.push_back(std::move(std::get<std::vector<int32_t>>(prompt)));
  // The text is made: what it was made of need not wait for the answer.
  job.request.messages = JsonArray();
  job.request.template_arguments = Json();
  job.form = context.options.form;
  return std::nullopt;
}

void run_generation(AppContext& context,
                    const std::shared_ptr<HttpExchange>& exchange,
                    GenerationJob job) {
  std::make_shared<Generation>(context, exchange, std::move(job))->start();
}

}  // namespace nibble
