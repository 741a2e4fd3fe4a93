#include "eval/generation.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "base/queue.h"
#include "text/text_stream.h"

namespace nibble {
namespace {

struct Event {
  size_t prompt = 0;
  TokenEvent event;
};
// Never full: the engine's thread does not wait.
using Events = BoundedQueue<Event>;

/// One answer while it grows.
struct Answer {
  TextStream stream;
  std::string text;
  std::shared_ptr<std::atomic<bool>> cancelled;
};

class Answers final {
 public:
  Answers(Engine& engine, const Tokenizer& tokenizer, const GenerationOptions& options)
      : engine_(engine), tokenizer_(tokenizer), options_(options) {}

  Status submit(const std::vector<int32_t>& prompt) {
    const size_t index = answers_.size();
    Request request;
    request.id = fmt::format("eval-{}", index);
    request.prompt = prompt;
    request.max_tokens =
        std::min(options_.max_tokens, engine_.options().max_model_len - std::ssize(prompt));
    request.sampling.temperature = 0;
    request.on_event = [events = events_, index](TokenEvent event) {
      Event one{.prompt = index, .event = std::move(event)};
      CHECK(events->try_push(one));
    };
    answers_.push_back({.stream = TextStream(tokenizer_, options_.stops),
                        .text = {},
                        .cancelled = request.cancelled});
    return engine_.submit(std::move(request));
  }

  /// Takes events until one more answer is whole.
  Status wait_for_one() {
    while (true) {
      const std::optional<Event> taken = events_->pop();
      CHECK(taken.has_value());
      const TokenEvent& event = taken->event;
      Answer& answer = answers_[taken->prompt];
      if (event.finish == FinishReason::kError) {
        return event.failure;
      }
      if (event.token >= 0 && !answer.stream.stopped()) {
        answer.text += answer.stream.push(event.token);
        if (answer.stream.stopped()) {
          answer.cancelled->store(true);
        }
      }
      if (event.finish != FinishReason::kNone) {
        answer.text += answer.stream.finish();
        return {};
      }
    }
  }

  void cancel() {
    for (const Answer& answer : answers_) {
      answer.cancelled->store(true);
    }
  }

  [[nodiscard]] std::vector<std::string> texts() {
    std::vector<std::string> out;
    for (Answer& answer : answers_) {
      out.push_back(std::move(answer.text));
    }
    return out;
  }

 private:
  Engine& engine_;
  const Tokenizer& tokenizer_;
  const GenerationOptions& options_;
  std::shared_ptr<Events> events_ = std::make_shared<Events>(std::numeric_limits<size_t>::max());
  std::vector<Answer> answers_;
};

Status run_all(Answers& answers,
               const std::vector<std::vector<int32_t>>& prompts,
               const std::pair<int64_t, const GenerationOptions&>& how) {
  const auto& [most, options] = how;
  int64_t submitted = 0;
  for (int64_t done = 0; done < std::ssize(prompts);) {
    if (submitted < std::ssize(prompts) && submitted - done < most) {
      NIBBLE_RETURN_IF_ERROR(answers.submit(prompts[static_cast<size_t>(submitted)])
                                 .with_context(fmt::format("prompt {}", submitted + 1)));
      ++submitted;
      continue;
    }
    NIBBLE_RETURN_IF_ERROR(answers.wait_for_one());
    options.progress(++done);
  }
  return {};
}

}  // namespace

Result<std::vector<std::string>> answer_all(Engine& engine,
                                            const Tokenizer& tokenizer,
                                            const std::vector<std::vector<int32_t>>& prompts,
                                            const GenerationOptions& options) {
  Answers answers(engine, tokenizer, options);
  // Enough that the scheduler always has one waiting.
  const int64_t most =
      std::min(engine.options().max_queued_requests, 2 * engine.options().max_num_seqs);
  const Status status = run_all(answers, prompts, {most, options});
  if (!status.ok()) {
    answers.cancel();
    return status;
  }
  return answers.texts();
}

}  // namespace nibble
