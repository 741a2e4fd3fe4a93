#include "server/generation.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "server/error.h"
#include "server/prompt.h"

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
  std::string take_token(Choice& choice, const TokenEvent& event);
  void stream_text(Choice& choice, const std::string& text, bool last);
  void end_choice(Choice& choice, FinishReason reason);
  void record(const Choice& choice, const std::string& reason);
  void fail(const ApiError& error);
  void cancel_all();
  void send_event(const Choice* choice, Json event);
  void complete();
  [[nodiscard]] Usage total_usage() const;
  [[nodiscard]] bool ends_answer(int32_t token) const;

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
  for (const auto& prompt : job_.prompts) {
    if (const auto error = check_prompt(context_, prompt, job_.request)) {
      exchange_->respond(error_response(*error));
      return;
    }
    for (int64_t i = 0; i < job_.request.n; ++i) {
      Choice& choice = choices_.emplace_back(job_.request, context_.text.tokenizer());
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

/// Counts a token and returns the text that it makes certain.
std::string Generation::take_token(Choice& choice, const TokenEvent& event) {
  const auto now = Clock::now();
  if (choice.usage.completion_tokens == 0) {
    choice.first_token = now;
  } else {
    context_.metrics.record_inter_token(seconds_between(choice.last_token, now));
  }
  choice.last_token = now;
  ++choice.usage.completion_tokens;
  const bool final_stop =
      event.finish == FinishReason::kStop && ends_answer(event.token) && !job_.request.include_stop;
  if (job_.request.logprobs >= 0 && !final_stop) {
    choice.entries.push_back({event, count_characters(choice.answer)});
  }
  return final_stop ? "" : choice.text.push(event.token);
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
  std::string text = event.token >= 0 ? take_token(choice, event) : "";
  if (choice.text.stopped()) {
    choice.cancelled->store(true);
    event.finish = FinishReason::kStop;
  }
  if (event.finish != FinishReason::kNone) {
    text += choice.text.finish();
  }
  choice.answer += text;
  if (job_.request.stream) {
    stream_text(choice, text, event.finish != FinishReason::kNone);
  }
  if (event.finish != FinishReason::kNone) {
    end_choice(choice, event.finish);
  }
}

/// Sends text when it is the first, the last, or there is enough of it.
void Generation::stream_text(Choice& choice, const std::string& text, bool last) {
  choice.unsent += text;
  ++choice.unsent_tokens;
  const bool due = last || choice.usage.completion_tokens == 1 ||
                   choice.unsent_tokens >= context_.options.stream_interval;
  if (!due || choice.unsent.empty()) {
    return;
  }
  send_event(&choice, job_.format->delta(choice, std::exchange(choice.unsent, {})));
  choice.unsent_tokens = 0;
  choice.entries.clear();
}

void Generation::end_choice(Choice& choice, FinishReason reason) {
  choice.finish_reason = reason == FinishReason::kLength ? "length" : "stop";
  record(choice, choice.finish_reason);
  if (job_.request.stream) {
    send_event(&choice, job_.format->delta(choice, ""));
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
       {"completion_tokens_details", Json::object({{"reasoning_tokens", 0}})}});
}

void run_generation(AppContext& context,
                    const std::shared_ptr<HttpExchange>& exchange,
                    GenerationJob job) {
  std::make_shared<Generation>(context, exchange, std::move(job))->start();
}

}  // namespace nibble
