#include "quantizer/task_queue.h"

#include <algorithm>
#include <utility>

namespace nibble {

TaskQueue::TaskQueue(const QuantizePlan& plan, std::vector<size_t> jobs, int64_t window)
    : plan_(plan), jobs_(std::move(jobs)), window_(window), measuring_(plan.extent_sets.size()) {}

std::optional<Task> TaskQueue::next(std::vector<std::span<const std::byte>>& ahead) {
  const std::lock_guard lock(mutex_);
  ahead.clear();
  if (stopped_ || !failure_.ok() || position_.job >= jobs_.size()) {
    return std::nullopt;
  }
  announce(ahead);
  const size_t job = jobs_[position_.job];
  if (const auto set = plan_.jobs[job].extent_set) {
    if (auto task = next_measure(*set)) {
      return task;
    }
  }
  Task task{Task::Kind::kWrite, job, position_.chunk, numbers_++};
  announced_bytes_ -= bytes_of(plan_.jobs[job].touched(position_.chunk));
  advance(position_);
  return task;
}

std::optional<Task> TaskQueue::next_measure(size_t set) {
  Measuring& state = measuring_[set];
  const std::vector<size_t>& members = plan_.extent_sets[set];
  if (!state.begun) {
    state.begun = true;
    for (const size_t member : members) {
      state.missing += plan_.jobs[member].chunk_count();
    }
  }
  if (state.member == members.size()) {
    return std::nullopt;
  }
  Task task{Task::Kind::kMeasure, members[state.member], state.chunk, numbers_++};
  if (++state.chunk == plan_.jobs[members[state.member]].chunk_count()) {
    state.chunk = 0;
    ++state.member;
  }
  return task;
}

void TaskQueue::advance(Cursor& cursor) const {
  if (++cursor.chunk == plan_.jobs[jobs_[cursor.job]].chunk_count()) {
    cursor.chunk = 0;
    ++cursor.job;
  }
}

void TaskQueue::announce(std::vector<std::span<const std::byte>>& ahead) {
  while (announced_.job < jobs_.size() && announced_bytes_ < window_) {
    const auto parts = plan_.jobs[jobs_[announced_.job]].touched(announced_.chunk);
    announced_bytes_ += bytes_of(parts);
    ahead.insert(ahead.end(), parts.begin(), parts.end());
    advance(announced_);
  }
}

void TaskQueue::measured(const Task& task, float absmax) {
  const std::lock_guard lock(mutex_);
  Measuring& state = measuring_[*plan_.jobs[task.job].extent_set];
  state.absmax = std::max(state.absmax, absmax);
  if (--state.missing == 0) {
    changed_.notify_all();
  }
}

std::optional<Extent> TaskQueue::extent_of(size_t job) {
  const auto set = plan_.jobs[job].extent_set;
  if (!set) {
    return Extent{};
  }
  std::unique_lock lock(mutex_);
  const Measuring& state = measuring_[*set];
  changed_.wait(lock, [&] { return state.missing == 0 || !failure_.ok() || stopped_; });
  return state.missing == 0 ? std::optional(Extent{state.absmax}) : std::nullopt;
}

void TaskQueue::fail(const Task& task, Status status) {
  const std::lock_guard lock(mutex_);
  if (failure_.ok() || task.number < failed_at_) {
    failure_ = std::move(status);
    failed_at_ = task.number;
  }
  changed_.notify_all();
}

void TaskQueue::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

Status TaskQueue::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace nibble
