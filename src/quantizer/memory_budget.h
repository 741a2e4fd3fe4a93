#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "quantizer/plan.h"

namespace nibble {

/// How a run stays inside its memory.
struct MemoryBudget {
  int threads = 1;           // that decode and encode
  int writers = 1;           // threads that wait for the device
  int chunks = 1;            // that are being encoded or written
  int64_t value_bytes = 0;   // of each thread's decoded rows
  int64_t output_bytes = 0;  // of each encoded chunk
  int64_t read_window = 0;   // bytes to read from the disk ahead; the system's memory, not ours
};

/// Rows of a job that are decoded at once: a multiple of the encoder's block.
[[nodiscard]] int64_t rows_at_once(const PlanJob& job);

/// Divides `memory` bytes, what the process has resident already included. Fewer threads than
/// wanted are taken when not all find room, after fewer chunks. kInvalidArgument, with the least
/// that is needed, when not even one does.
///   jobs  indices of the jobs that will run
Result<MemoryBudget> plan_memory(const QuantizePlan& plan,
                                 const std::vector<size_t>& jobs,
                                 int threads,
                                 int64_t memory);

}  // namespace nibble
