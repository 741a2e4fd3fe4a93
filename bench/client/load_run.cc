#include "bench/client/load_run.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <utility>

namespace nibble {
namespace {

using Clock = HttpClient::Clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// Reads one answer and times it.
class TimedAnswer final {
 public:
  TimedAnswer(const LoadTarget& target, LoadRecord& record, Clock::time_point sent)
      : timing_(target.timing),
        record_(record),
        sent_(sent),
        stream_(target.api, [this](const AnswerFrame& frame) { take(frame); }) {}

  void head(const HttpHead& head) { stream_.head(head); }
  void body(std::string_view bytes, Clock::time_point now) {
    now_ = now;
    stream_.body(bytes);
  }
  void end(const Status& status) {
    const Status read = status.ok() ? stream_.finish() : status;
    if (read.ok() && !marked_) {
      record_.status = make_error(StatusCode::kCorrupt, "the answer has no token");
    } else {
      record_.status = read;
    }
  }

 private:
  void take(const AnswerFrame& frame) {
    const bool has_text = !frame.text.empty() || !frame.reasoning.empty();
    if (timing_ == LoadTiming::kVllm ? frame.has_choice : has_text) {
      mark();
    }
    if (timing_ == LoadTiming::kSglang) {
      record_.latency = seconds_between(sent_, now_);
    }
    record_.text += frame.reasoning;
    record_.text += frame.text;
    record_.answer += frame.text;
    if (!frame.finish_reason.empty()) {
      record_.finish_reason = frame.finish_reason;
    }
    if (frame.usage) {
      record_.output_len = frame.usage->completion_tokens;
      const bool known = timing_ == LoadTiming::kSglang && record_.input_len >= 0;
      if (!known && frame.usage->prompt_tokens > 0) {
        record_.input_len = frame.usage->prompt_tokens;
      }
    }
  }
  void mark() {
    if (std::exchange(marked_, true)) {
      record_.gaps.push_back(seconds_between(last_, now_));
    } else {
      record_.ttft = seconds_between(sent_, now_);
    }
    last_ = now_;
    record_.latency = seconds_between(sent_, now_);
  }

  LoadTiming timing_;
  LoadRecord& record_;
  Clock::time_point sent_;
  Clock::time_point now_;
  Clock::time_point last_;
  bool marked_ = false;
  AnswerReader stream_;
};

class Run final {
 public:
  Run(HttpClient& client,
      const LoadTarget& target,
      LoadPlan plan,
      const std::function<void(int64_t)>& on_done)
      : client_(client), target_(target), plan_(std::move(plan)), on_done_(on_done) {
    result_.records.resize(plan_.requests.size());
  }

  LoadResult run() {
    begin_ = Clock::now();
    last_end_ = begin_;
    client_.at(begin_, [this] { arrive(); });
    client_.run();
    result_.duration = seconds_between(begin_, last_end_);
    return std::move(result_);
  }

 private:
  // Sends what has arrived, and waits for the next arrival.
  void arrive() {
    const Clock::time_point now = Clock::now();
    while (next_ < plan_.requests.size()) {
      const Clock::time_point due = due_at(next_);
      if (due > now) {
        client_.at(due, [this] { arrive(); });
        return;
      }
      waiting_.push_back({next_++, now});
      send_waiting();
    }
  }
  Clock::time_point due_at(size_t i) const {
    const double wait = plan_.arrivals.empty() ? 0 : plan_.arrivals[i];
    return begin_ +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait));
  }
  void send_waiting() {
    while (!waiting_.empty() && (plan_.max_concurrency == 0 || running_ < plan_.max_concurrency)) {
      const auto [i, arrived] = waiting_.front();
      waiting_.pop_front();
      send(i, arrived);
    }
  }
  void send(size_t i, Clock::time_point arrived) {
    ++running_;
    LoadRecord& record = result_.records[i];
    const Clock::time_point sent = Clock::now();
    record.start = seconds_between(begin_, sent);
    record.queue = seconds_between(arrived, sent);
    record.input_len = plan_.requests[i].input_len;
    const auto answer = std::make_shared<TimedAnswer>(target_, record, sent);
    client_.start({.method = "POST",
                   .target = target_.route,
                   .headers = target_.headers,
                   .body = std::move(plan_.requests[i].body),
                   .on_head = [answer](const HttpHead& head) { answer->head(head); },
                   .on_body = [answer](std::string_view bytes,
                                       HttpCall::Time time) { answer->body(bytes, time); },
                   .on_end =
                       [this, answer](const Status& status) {
                         answer->end(status);
                         ended();
                       }});
  }
  void ended() {
    --running_;
    last_end_ = Clock::now();
    if (on_done_) {
      on_done_(++done_);
    }
    send_waiting();
  }

  HttpClient& client_;
  const LoadTarget& target_;
  LoadPlan plan_;
  const std::function<void(int64_t)>& on_done_;
  LoadResult result_;
  Clock::time_point begin_;
  Clock::time_point last_end_;
  std::deque<std::pair<size_t, Clock::time_point>> waiting_;
  size_t next_ = 0;
  int64_t running_ = 0;
  int64_t done_ = 0;
};

}  // namespace

LoadResult run_load(HttpClient& client,
                    const LoadTarget& target,
                    LoadPlan plan,
                    const std::function<void(int64_t)>& on_done) {
  return Run(client, target, std::move(plan), on_done).run();
}

}  // namespace nibble
