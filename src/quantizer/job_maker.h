#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint_reader.h"
#include "quantizer/algorithms/rounding.h"
#include "quantizer/digest.h"
#include "quantizer/journal.h"
#include "quantizer/pipeline.h"
#include "quantizer/plan.h"
#include "quantizer/shard_store.h"

namespace nibble {

/// What a JobMaker works with.
struct JobMakerContext {
  const CheckpointReader& reader;  // of the plan's source
  const QuantizePlan& plan;
  ShardStore& store;
  std::string folder;  // of the work, for files named "calibration-..."
  int threads = 1;
  int64_t memory = 0;                                     // resident bytes
  const std::atomic<bool>* stop = nullptr;                // may become true at any time
  std::function<void(const QuantizeProgress&)> progress;  // may be empty
  QuantizeProgress begin;                                 // what is done before
};

/// Makes some jobs of a plan before all others are streamed: those whose codes depend on more than
/// their own weights. What it makes depends on the plan and its recipe alone; files of its own are
/// gone when it is done.
class JobMaker {
 public:
  virtual ~JobMaker() = default;
  /// All that decides what it makes: part of the plan's hash, and kept with the output.
  [[nodiscard]] virtual Json recipe() const = 0;
  /// Seconds of make() by part, for people; null: it does not say.
  [[nodiscard]] virtual Json seconds() const { return {}; }
  /// Resident bytes that make() takes at least, beside what the process has already.
  [[nodiscard]] virtual int64_t least_memory(const QuantizePlan& /*plan*/, int /*threads*/) const {
    return 0;
  }
  /// kCancelled when stopped; what was stored stays stored.
  virtual Status make(const JobMakerContext& context) = 0;
  /// Called when weights, index and config.json are in the folder: adds what belongs to them.
  virtual Status complete(const QuantizePlan& /*plan*/, const std::string& /*folder*/) const {
    return {};
  }
};

/// Encodes a matrix that is rounded in pieces of its rows, writes it and records the job.
class RoundedJob final {
 public:
  /// absmax: of the whole matrix.
  RoundedJob(const JobMakerContext& context, size_t job, float absmax);

  /// The next rows, as many as piece_rows() says, or what is left; chunks side by side.
  ///   w  [rows, k]: the source's weights
  Status add(std::span<const float> w, const RoundedMatrix& rounded, ThreadPool& pool);
  /// After all rows.
  Status finish(CalibrationRecord record);

 private:
  struct Piece;
  /// A chunk on its way to the store.
  struct Chunk;
  /// Encodes one of a chunk's blocks of rows.
  void encode_block(const Piece& piece, int64_t block, Chunk& chunk) const;
  [[nodiscard]] Status write_chunk(Chunk& chunk) const;
  [[nodiscard]] Chunk make_chunk(int64_t index) const;

  const JobMakerContext& context_;
  size_t index_;
  const PlanJob& job_;
  Extent extent_;
  int64_t chunk_ = 0;                         // the next one
  std::vector<std::vector<Digest>> digests_;  // by output, then chunk
  RowsError error_;
};

/// Rows of a matrix that are rounded at a time: chunks of its job with at most `weights` weights,
/// but one chunk at least.
[[nodiscard]] int64_t piece_rows(const PlanJob& job, int64_t weights);

}  // namespace nibble
