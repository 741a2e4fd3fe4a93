#include "answer.h"

#include <chrono>
#include <memory>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/queue.h"
#include "text/answer/answer_stream.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

// Brings events from the engine's thread here, with a descriptor that can be waited for.
class EventPipe final {
 public:
  explicit EventPipe(size_t capacity) : queue_(capacity), fd_(eventfd(0, EFD_CLOEXEC)) {
    CHECK(fd_ >= 0);
  }
  EventPipe(const EventPipe&) = delete;
  EventPipe& operator=(const EventPipe&) = delete;
  ~EventPipe() { close(fd_); }

  void push(TokenEvent event) {
    CHECK(queue_.try_push(event));
    const uint64_t one = 1;
    CHECK(write(fd_, &one, sizeof one) == sizeof one);
  }
  // Waits for an event, or for `interrupt_fd` to be readable (empty then).
  std::optional<TokenEvent> pop(int interrupt_fd) {
    while (true) {
      if (auto event = queue_.try_pop()) {
        return event;
      }
      pollfd fds[] = {{.fd = fd_, .events = POLLIN, .revents = 0},
                      {.fd = interrupt_fd, .events = POLLIN, .revents = 0}};
      if (poll(fds, 2, -1) < 0) {
        continue;  // a signal that concerns others
      }
      if ((fds[1].revents & POLLIN) != 0) {
        return std::nullopt;
      }
      if ((fds[0].revents & POLLIN) != 0) {
        uint64_t count = 0;
        CHECK(read(fd_, &count, sizeof count) == sizeof count);
      }
    }
  }

 private:
  BoundedQueue<TokenEvent> queue_;
  const int fd_;
};

std::string reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    default:
      return "cancelled";
  }
}

// Gives pieces of an answer to those who asked for it, and keeps what is no thought.
void hand_on(const std::vector<AnswerPiece>& pieces, const AnswerRequest& request, Answer& answer) {
  for (const AnswerPiece& piece : pieces) {
    const bool thought = piece.kind == AnswerPiece::Kind::kReasoning;
    answer.text += thought ? std::string() : piece.text;
    const auto& sink = thought ? request.on_reasoning : request.on_text;
    if (sink) {
      sink(piece.text);
    }
  }
}

}  // namespace

Result<Answer> ask(ServingSession& session, AnswerRequest request) {
  auto pipe = std::make_shared<EventPipe>(static_cast<size_t>(request.max_tokens) + 1);
  AnswerStream stream(*session.tokenizer,
                      {.parser = std::move(request.parts), .stops = std::move(request.stop)});
  Request engine_request;
  engine_request.id = "cli";
  engine_request.prompt = std::move(request.prompt);
  engine_request.max_tokens = request.max_tokens;
  engine_request.sampling = std::move(request.sampling);
  engine_request.on_event = [pipe](TokenEvent event) { pipe->push(std::move(event)); };
  const auto cancelled = engine_request.cancelled;
  Answer answer;
  const auto start = Clock::now();
  NIBBLE_RETURN_IF_ERROR(session.engine->submit(std::move(engine_request)));
  Clock::time_point first;
  Clock::time_point last;
  int interrupt_fd = request.interrupt_fd;
  while (true) {
    auto event = pipe->pop(interrupt_fd);
    if (!event) {
      cancelled->store(true);
      interrupt_fd = -1;  // said once is enough; the caller reads the signal
      continue;
    }
    if (event->finish == FinishReason::kError) {
      return event->failure;
    }
    if (event->token >= 0 && !stream.stopped()) {
      last = Clock::now();
      first = answer.tokens.empty() ? last : first;
      answer.tokens.push_back(event->token);
      hand_on(stream.push(event->token), request, answer);
      if (stream.stopped()) {
        cancelled->store(true);
      }
    }
    if (event->finish != FinishReason::kNone) {
      hand_on(stream.finish(), request, answer);
      answer.finish_reason = stream.stopped() ? "stop" : reason_name(event->finish);
      answer.prompt_tokens = event->prompt_tokens;
      answer.cached_tokens = event->cached_tokens;
      break;
    }
  }
  if (!answer.tokens.empty()) {
    answer.ttft_ms = ms_between(start, first);
  }
  if (answer.tokens.size() > 1) {
    answer.tpot_ms = ms_between(first, last) / static_cast<double>(answer.tokens.size() - 1);
  }
  return answer;
}

}  // namespace nibble
