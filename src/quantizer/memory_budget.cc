#include "quantizer/memory_budget.h"

#include <algorithm>

#include "base/block_file.h"
#include "base/process.h"

namespace nibble {
namespace {

constexpr int64_t kMega = int64_t{1} << 20;
constexpr int64_t kValueBytes = 256 << 10;  // decoded rows should stay in the second-level cache
constexpr int64_t kSlack = 12 * kMega;      // stacks, allocator, code not touched so far
constexpr int64_t kPerThread = kMega;
constexpr int64_t kChunksPerThread = 3;
constexpr int64_t kPageSlop = 4 * kMega;  // what the system maps around a run of bytes
constexpr int64_t kRecordBytes = 400;     // of what is remembered of a job that is done

struct Needs {
  int64_t values = 0;
  int64_t output = 0;
  int64_t mapped = 0;  // of one chunk
  // Of scattered jobs, whose pages stay until they are done: the largest, and its chunks.
  int64_t scattered = 0;
  int64_t chunks = 1;
};

Needs most_needed(const QuantizePlan& plan, const std::vector<size_t>& jobs) {
  Needs most;
  for (const size_t index : jobs) {
    const PlanJob& job = plan.jobs[index];
    int64_t mapped = 0;
    for (const auto& part : job.touched(0)) {
      mapped += static_cast<int64_t>(part.size()) + kPageSlop;
    }
    if (job.scattered && mapped > most.scattered) {
      most.scattered = mapped;
      most.chunks = job.chunk_count();
    } else if (!job.scattered) {
      most.mapped = std::max(most.mapped, mapped);
    }
    int64_t output = 0;
    for (size_t slot = 0; slot < job.outputs.size(); ++slot) {
      output += BlockMemory::needed(job.place(slot, 0).bytes);
    }
    most.output = std::max(most.output, output);
    if (job.matrix != nullptr) {
      most.values = std::max(most.values, rows_at_once(job) * job.matrix->k() * 4);
    }
  }
  return most;
}

}  // namespace

int64_t rows_at_once(const PlanJob& job) {
  const int64_t block = job.encoder->row_block();
  const int64_t fit = kValueBytes / (4 * job.matrix->k());
  return std::min(std::max(block, fit / block * block), job.chunk(0).count);
}

Result<MemoryBudget> plan_memory(const QuantizePlan& plan,
                                 const std::vector<size_t>& jobs,
                                 int threads,
                                 int64_t memory) {
  const Needs most = most_needed(plan, jobs);
  const int64_t base = rss_bytes() + kSlack + static_cast<int64_t>(plan.jobs.size()) * kRecordBytes;
  const auto writers_of = [](int64_t count) { return count / 2 + 1; };
  const auto needed = [&](int64_t count, int64_t chunks) {
    // Jobs under way at once; a set with one extent is read before its first member is done.
    const int64_t jobs_open = chunks / most.chunks + 4;
    const int64_t mapped = std::max(count * most.mapped, jobs_open * most.scattered);
    return base + count * most.values + (count + writers_of(count)) * kPerThread +
           chunks * BlockMemory::size(most.output) + mapped;
  };
  int64_t count = threads;
  int64_t chunks = kChunksPerThread * count;
  while (chunks > 1 && needed(count, chunks) > memory) {
    --chunks;
    count = std::min(count, chunks);
  }
  if (needed(count, chunks) > memory) {
    return make_error(StatusCode::kInvalidArgument,
                      "--memory {} MiB is too little for this model: it needs {} MiB",
                      memory / kMega, (needed(1, 1) + kMega - 1) / kMega);
  }
  MemoryBudget budget;
  budget.threads = static_cast<int>(count);
  budget.writers = static_cast<int>(writers_of(count));
  budget.chunks = static_cast<int>(chunks);
  budget.value_bytes = most.values;
  budget.output_bytes = most.output;
  budget.read_window = std::clamp(memory / 16, 8 * kMega, 128 * kMega);
  return budget;
}

}  // namespace nibble
