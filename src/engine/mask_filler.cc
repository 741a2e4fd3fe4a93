#include "engine/mask_filler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/thread_name.h"
#include "ops/token_mask.h"

namespace nibble {
namespace {

// A mask of 128k tokens takes 10 to 100 us: eight threads keep 256 of them below what a step takes.
// One may take a second, and must not hold up all others.
constexpr unsigned kFewestThreads = 2;
constexpr unsigned kMostThreads = 8;
constexpr std::chrono::milliseconds kPatience{10};

// Whether it has no mask to wait for.
bool is_ready(const ScheduledSequence& item) {
  return item.sequence != nullptr &&
         (item.sequence->mask_job == nullptr || item.sequence->mask_job->done);
}

bool is_pending(const ScheduledSequence& item) {
  return item.sequence != nullptr && !is_ready(item);
}

}  // namespace

MaskFiller::~MaskFiller() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void MaskFiller::begin_threads() {
  const unsigned threads =
      std::clamp(std::thread::hardware_concurrency() / 2, kFewestThreads, kMostThreads);
  while (threads_.size() < threads) {
    threads_.emplace_back([this, number = static_cast<int>(threads_.size())] {
      name_thread("masks", number);
      work();
    });
  }
}

void MaskFiller::start(std::span<const ScheduledSequence> plan) {
  std::vector<std::shared_ptr<MaskJob>> jobs;
  for (const ScheduledSequence& item : plan) {
    Sequence* const sequence = item.sequence;
    if (sequence == nullptr || sequence->request.constraint == nullptr ||
        sequence->mask_job != nullptr || sequence->mask_length == sequence->length() ||
        sequence->computed + item.num_tokens != sequence->length()) {
      continue;
    }
    sequence->mask_job = std::make_shared<MaskJob>();
    sequence->mask_job->constraint = sequence->request.constraint;
    sequence->mask_job->mask = std::move(sequence->mask);
    sequence->mask_job->mask.resize(static_cast<size_t>(mask_words(vocab_size_)));
    jobs.push_back(sequence->mask_job);
  }
  if (jobs.empty()) {
    return;
  }
  begin_threads();
  {
    const std::lock_guard lock(mutex_);
    jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
  }
  wake_.notify_all();
}

void MaskFiller::wait(std::span<const ScheduledSequence> plan) {
  {
    const auto none_pending = [&] { return std::ranges::none_of(plan, is_pending); };
    const auto any_ready = [&] { return std::ranges::any_of(plan, is_ready); };
    std::unique_lock lock(mutex_);
    if (!done_.wait_for(lock, kPatience, none_pending)) {
      done_.wait(lock, any_ready);
    }
  }
  for (const ScheduledSequence& item : plan) {
    if (item.sequence != nullptr && item.sequence->mask_job != nullptr && is_ready(item)) {
      Sequence& sequence = *item.sequence;
      sequence.mask = std::move(sequence.mask_job->mask);
      sequence.mask_job.reset();
      sequence.mask_length = sequence.length();
    }
  }
}

void MaskFiller::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) {
      return;
    }
    const std::shared_ptr<MaskJob> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    if (!job->constraint->fill(job->mask)) {
      job->mask.clear();
    }
    lock.lock();
    job->done = true;
    done_.notify_one();
  }
}

}  // namespace nibble
