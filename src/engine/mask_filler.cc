#include "engine/mask_filler.h"

#include <algorithm>

#include "base/thread_name.h"
#include "ops/token_mask.h"

namespace nibble {
namespace {

// A mask of 128k tokens takes 10 to 100 us: eight threads keep 256 of them below what a step takes.
constexpr unsigned kMostThreads = 8;

void fill_mask(Sequence& sequence, int64_t vocab_size) {
  sequence.mask.resize(static_cast<size_t>(mask_words(vocab_size)));
  if (!sequence.request.constraint->fill(sequence.mask)) {
    sequence.mask.clear();
  }
  sequence.mask_length = sequence.length();
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

void MaskFiller::start(std::span<const ScheduledSequence> plan) {
  sequences_.clear();
  for (const ScheduledSequence& item : plan) {
    Sequence* const sequence = item.sequence;
    if (sequence->request.constraint != nullptr && sequence->mask_length != sequence->length() &&
        sequence->computed + item.num_tokens == sequence->length()) {
      sequences_.push_back(sequence);
    }
  }
  if (sequences_.empty()) {
    return;
  }
  const unsigned threads = std::clamp(std::thread::hardware_concurrency() / 2, 1U, kMostThreads);
  while (threads_.size() < threads) {
    threads_.emplace_back([this, number = static_cast<int>(threads_.size())] {
      name_thread("masks", number);
      work();
    });
  }
  next_ = 0;
  {
    const std::lock_guard lock(mutex_);
    ++round_;
    busy_ = threads_.size();
  }
  wake_.notify_all();
}

void MaskFiller::wait() {
  if (sequences_.empty()) {
    return;
  }
  fill_some();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return busy_ == 0; });
  sequences_.clear();
}

void MaskFiller::fill_some() {
  for (size_t i = next_++; i < sequences_.size(); i = next_++) {
    fill_mask(*sequences_[i], vocab_size_);
  }
}

void MaskFiller::work() {
  int64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
    if (stopping_) {
      return;
    }
    seen = round_;
    lock.unlock();
    fill_some();
    lock.lock();
    if (--busy_ == 0) {
      done_.notify_one();
    }
  }
}

}  // namespace nibble
