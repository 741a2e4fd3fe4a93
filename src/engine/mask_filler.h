#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "engine/scheduler.h"

namespace nibble {

/// Fills the masks of a step's constrained sequences on threads of its own, so that a model may
/// compute meanwhile. The threads begin with the first such sequence. Calls come from one thread.
class MaskFiller final {
 public:
  explicit MaskFiller(int64_t vocab_size) : vocab_size_(vocab_size) {}
  ~MaskFiller();
  MaskFiller(const MaskFiller&) = delete;
  MaskFiller& operator=(const MaskFiller&) = delete;

  /// Begins to fill Sequence::mask of those whose last token the plan reaches and whose mask is not
  /// that of their next token yet. Nobody may touch these sequences before wait().
  void start(std::span<const ScheduledSequence> plan);
  /// Returns when all are filled.
  void wait();

 private:
  void work();
  void fill_some();

  const int64_t vocab_size_;
  std::vector<Sequence*> sequences_;  // changes while no thread is at work
  std::atomic<size_t> next_{0};       // of sequences_, nobody's yet
  std::mutex mutex_;                  // guards what follows
  std::condition_variable wake_, done_;
  int64_t round_ = 0;
  size_t busy_ = 0;  // threads
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nibble
