#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "quantizer/encoder.h"
#include "quantizer/plan.h"

namespace nibble {

/// One unit of work: a chunk of a job, looked at for its extent or written.
struct Task {
  enum class Kind : uint8_t { kMeasure, kWrite };

  Kind kind = Kind::kWrite;
  size_t job = 0;
  int64_t chunk = 0;
  int64_t number = 0;  // in the order of the queue
};

/// Hands out the chunks of jobs in order, a first pass for the extents of matrices before their
/// chunks are written. Keeps the first failure in that order, whatever thread met it first.
/// Thread-safe.
class TaskQueue final {
 public:
  /// jobs: in the order of work. Bytes of at most `window` are announced ahead for reading.
  TaskQueue(const QuantizePlan& plan, std::vector<size_t> jobs, int64_t window);

  /// The next task; empty when there is none, after a failure and after stop(). `ahead` receives
  /// the bytes that should be read from the disk meanwhile.
  std::optional<Task> next(std::vector<std::span<const std::byte>>& ahead);
  /// The task is done; a measured one brings its extent.
  void measured(const Task& task, float absmax);
  /// Waits until all of the job's extent is measured; empty when that will not happen.
  std::optional<Extent> extent_of(size_t job);
  void fail(const Task& task, Status status);
  void stop();
  [[nodiscard]] Status failure();

 private:
  struct Measuring {
    bool begun = false;
    size_t member = 0;  // the next chunk to hand out
    int64_t chunk = 0;
    int64_t missing = 0;  // chunks
    float absmax = 0;
  };
  struct Cursor {
    size_t job = 0;  // index into jobs_
    int64_t chunk = 0;
  };

  std::optional<Task> next_measure(size_t set);
  void advance(Cursor& cursor) const;
  void announce(std::vector<std::span<const std::byte>>& ahead);

  const QuantizePlan& plan_;
  const std::vector<size_t> jobs_;
  const int64_t window_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Cursor position_;
  Cursor announced_;
  int64_t announced_bytes_ = 0;  // beyond position_
  int64_t numbers_ = 0;
  std::vector<Measuring> measuring_;  // by extent set
  bool stopped_ = false;
  int64_t failed_at_ = 0;
  Status failure_;
};

}  // namespace nibble
