#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "engine/scheduler.h"

namespace nibble {

/// A mask that is being filled. It owns what that needs, so that its sequence may end meanwhile.
struct MaskJob {
  std::shared_ptr<TokenConstraint> constraint;
  std::vector<uint32_t> mask;
  std::atomic<bool> done = false;
};

/// Fills the masks of a step's constrained sequences on threads of its own, so that a model may
/// compute meanwhile. The threads begin with the first such sequence. Calls come from one thread.
class MaskFiller final {
 public:
  explicit MaskFiller(int64_t vocab_size) : vocab_size_(vocab_size) {}
  ~MaskFiller();
  MaskFiller(const MaskFiller&) = delete;
  MaskFiller& operator=(const MaskFiller&) = delete;

  /// Begins to fill the masks of those whose last token the plan reaches and whose mask is not that
  /// of their next token yet. Until wait() has taken it, nobody may touch the constraint.
  void start(std::span<const ScheduledSequence> plan);
  /// Takes the masks of the plan into Sequence::mask when all are filled. Where one takes long, and
  /// others of the plan can go on, it is left: then its sequence still has a mask_job.
  void wait(std::span<const ScheduledSequence> plan);

 private:
  void begin_threads();
  void work();

  const int64_t vocab_size_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, done_;
  std::deque<std::shared_ptr<MaskJob>> jobs_;  // nobody's yet
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace nibble
