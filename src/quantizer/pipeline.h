#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "quantizer/memory_budget.h"
#include "quantizer/plan.h"
#include "quantizer/shard_store.h"

namespace nibble {

struct QuantizeProgress {
  int64_t bytes_before = 0;  // of the source: done by earlier runs
  int64_t bytes_done = 0;    // these included
  int64_t bytes_total = 0;
  int64_t tensors_done = 0;
  int64_t tensors_total = 0;
  std::string tensor;        // just finished
  std::string worst_tensor;  // of this run; empty so far when nothing was quantized
  double worst_snr_db = 0;
};

struct PipelineOptions {
  MemoryBudget budget;
  const std::atomic<bool>* stop = nullptr;                // may become true at any time
  std::function<void(const QuantizeProgress&)> progress;  // may be empty; never called in parallel
  QuantizeProgress begin;                                 // what is done before
};

/// Does the jobs that a store has to do: threads decode, encode and hash chunks, while others write
/// them and the system reads ahead. Bytes and statistics do not depend on threads or memory.
///
/// After a failure the work that is done stays done. Errors: kCancelled when stopped; of several
/// failures the first in the order of the plan: kCorrupt, kResourceExhausted, kIo.
Status run_pipeline(const CheckpointReader& reader,
                    const QuantizePlan& plan,
                    ShardStore& store,
                    const PipelineOptions& options);

}  // namespace nibble
