#include "quantizer/pipeline.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/block_file.h"
#include "base/log.h"
#include "base/queue.h"
#include "base/thread_name.h"
#include "checkpoint/finite.h"
#include "quantizer/digest.h"
#include "quantizer/task_queue.h"

namespace nibble {
namespace {

// What the chunks of a job that is under way left behind.
struct OpenJob {
  int64_t missing = 0;
  std::vector<std::vector<Digest>> digests;  // by output, then chunk
  std::vector<RowsError> errors;             // by chunk
};

class Pipeline final {
 public:
  Pipeline(const CheckpointReader& reader,
           const QuantizePlan& plan,
           ShardStore& store,
           const PipelineOptions& options)
      : reader_(reader),
        plan_(plan),
        store_(store),
        options_(options),
        queue_(plan, store.jobs_to_do(), options.budget.read_window),
        free_(static_cast<size_t>(options.budget.chunks)),
        encoded_(static_cast<size_t>(options.budget.chunks)),
        progress_(options.begin) {}

  Status run() {
    for (int i = 0; i < options_.budget.chunks; ++i) {
      free_.push(std::make_unique<Chunk>(options_.budget.output_bytes));
    }
    std::vector<std::thread> writers;
    for (int i = 0; i < options_.budget.writers; ++i) {
      writers.emplace_back([this, i] {
        name_thread("write", i);
        write_chunks();
      });
    }
    std::vector<std::thread> helpers;
    for (int i = 1; i < options_.budget.threads; ++i) {
      helpers.emplace_back([this, i] {
        name_thread("encode", i);
        compute_chunks();
      });
    }
    compute_chunks();
    for (std::thread& helper : helpers) {
      helper.join();
    }
    encoded_.close();
    for (std::thread& writer : writers) {
      writer.join();
    }
    NIBBLE_RETURN_IF_ERROR(queue_.failure());
    if (stop_asked()) {
      return make_error(StatusCode::kCancelled, "stopped");
    }
    return {};
  }

 private:
  // What a task has for the file.
  struct Chunk {
    explicit Chunk(int64_t bytes) : memory(bytes) {}

    Task task;
    BlockMemory memory;
    std::vector<std::span<std::byte>> pieces;  // by slot; none when there is nothing to write
    std::vector<Digest> digests;               // by slot
    RowsError error;
  };

  [[nodiscard]] bool stop_asked() const { return options_.stop != nullptr && *options_.stop; }

  // Never waits for the device while a chunk is free.
  void compute_chunks() {
    std::vector<float> values(static_cast<size_t>(options_.budget.value_bytes) / sizeof(float));
    std::vector<std::span<const std::byte>> ahead;
    while (true) {
      auto chunk = std::move(*free_.pop());
      if (stop_asked()) {
        queue_.stop();
      }
      const auto task = queue_.next(ahead);
      if (!task) {
        free_.push(std::move(chunk));
        return;
      }
      for (const auto& part : ahead) {
        reader_.read_ahead(part);
      }
      chunk->task = *task;
      chunk->memory.clear();
      chunk->pieces.clear();
      chunk->digests.clear();
      Status status = compute(*task, values.data(), *chunk);
      if (!plan_.jobs[task->job].scattered) {
        drop_pages(plan_.jobs[task->job], task->chunk);
      }
      if (!status.ok()) {
        chunk->pieces.clear();
        queue_.fail(*task, std::move(status));
      }
      (chunk->pieces.empty() ? free_ : encoded_).push(std::move(chunk));
    }
  }

  void write_chunks() {
    while (auto chunk = encoded_.pop()) {
      if (Status status = write(**chunk); !status.ok()) {
        queue_.fail((*chunk)->task, std::move(status));
      }
      free_.push(std::move(*chunk));
    }
  }

  Status compute(const Task& task, float* values, Chunk& chunk) {
    if (task.kind == Task::Kind::kMeasure) {
      return measure(task, values);
    }
    if (plan_.jobs[task.job].matrix != nullptr) {
      return encode(task, values, chunk);
    }
    return copy(task, chunk);
  }

  void drop_pages(const PlanJob& job, int64_t chunk) const {
    for (const auto& part : job.touched(chunk)) {
      reader_.drop_pages(part);
    }
  }

  // Calls fn(row, rows, values) for the decoded rows of a chunk.
  template <typename Fn>
  Status for_rows(const Task& task, float* values, const Fn& fn) {
    const PlanJob& job = plan_.jobs[task.job];
    const PlanJob::Range range = job.chunk(task.chunk);
    const int64_t step = rows_at_once(job);
    for (int64_t row = range.begin; row < range.begin + range.count; row += step) {
      const int64_t rows = std::min(step, range.begin + range.count - row);
      NIBBLE_RETURN_IF_ERROR(job.matrix->decode(row, rows, values));
      const Status status = fn(row, rows, values);
      NIBBLE_RETURN_IF_ERROR(status.with_context(job.matrix->where()));
    }
    return {};
  }

  // The chunk's weights, if they are stored as BF16 and nothing else lies between them.
  [[nodiscard]] std::optional<std::span<const std::byte>> stored_bf16(const Task& task) const {
    const SourceMatrix& matrix = *plan_.jobs[task.job].matrix;
    const PlanJob::Range range = plan_.jobs[task.job].chunk(task.chunk);
    if (matrix.tensors().size() != 1 || matrix.tensors()[0]->dtype != DType::kBF16) {
      return std::nullopt;
    }
    const auto parts = matrix.touched(range.begin, range.count);
    const bool dense = parts.size() == 1 && bytes_of(parts) == range.count * matrix.k() * 2;
    return dense ? std::optional(parts[0]) : std::nullopt;
  }

  Status measure(const Task& task, float* values) {
    if (const auto bytes = stored_bf16(task)) {
      if (const auto largest = absmax_of_bf16(*bytes)) {
        queue_.measured(task, *largest);
        return {};
      }  // else the place of the weight is found below
    }
    const int64_t k = plan_.jobs[task.job].matrix->k();
    float largest = 0;
    NIBBLE_RETURN_IF_ERROR(
        for_rows(task, values, [&](int64_t row, int64_t rows, const float* x) -> Status {
          NIBBLE_ASSIGN_OR_RETURN(const float absmax, absmax_of(x, row, rows, k));
          largest = std::max(largest, absmax);
          return {};
        }));
    queue_.measured(task, largest);
    return {};
  }

  Status encode(const Task& task, float* values, Chunk& chunk) {
    const auto extent = queue_.extent_of(task.job);
    if (!extent) {
      return {};  // another thread failed or was stopped; its report stands
    }
    const PlanJob& job = plan_.jobs[task.job];
    std::vector<std::byte*> next = make_room(task, chunk);  // by slot: where the next rows go
    chunk.error = {};
    NIBBLE_RETURN_IF_ERROR(for_rows(task, values, [&](int64_t row, int64_t rows, const float* x) {
      return encode_rows(job, {row, rows}, x, *extent, next, chunk.error);
    }));
    for (const std::span<std::byte> piece : chunk.pieces) {
      chunk.digests.push_back(digest_of(piece));
    }
    return {};
  }

  std::vector<std::byte*> make_room(const Task& task, Chunk& chunk) {
    const PlanJob& job = plan_.jobs[task.job];
    std::vector<std::byte*> begins;
    for (size_t slot = 0; slot < job.outputs.size(); ++slot) {
      const MatrixEncoder::Place place = job.place(slot, task.chunk);
      chunk.pieces.push_back(
          chunk.memory.take(job.outputs[slot].offset + place.offset, place.bytes));
      begins.push_back(chunk.pieces.back().data());
    }
    return begins;
  }

  static Status encode_rows(const PlanJob& job,
                            PlanJob::Range rows,
                            const float* x,
                            const Extent& extent,
                            std::vector<std::byte*>& next,
                            RowsError& error) {
    const int64_t block = job.encoder->row_block();
    for (int64_t done = 0; done < rows.count; done += block) {
      const int64_t row = rows.begin + done;
      const int64_t count = std::min(block, rows.count - done);
      RowsError part;
      NIBBLE_RETURN_IF_ERROR(
          job.encoder->encode(row, count, x + done * job.matrix->k(), extent, next, part));
      error.add(part);
      for (size_t slot = 0; slot < next.size(); ++slot) {
        next[slot] += job.encoder->place(slot, row, count).bytes;
      }
    }
    return {};
  }

  Status copy(const Task& task, Chunk& chunk) {
    const PlanJob& job = plan_.jobs[task.job];
    const PlanJob::Range range = job.chunk(task.chunk);
    if (!all_finite(job.tensor->dtype, job.touched(task.chunk)[0])) {
      NIBBLE_RETURN_IF_ERROR(check_kept(job));
    }
    std::byte* const to = make_room(task, chunk)[0];
    std::memcpy(to, job.tensor->data.data() + range.begin, static_cast<size_t>(range.count));
    chunk.digests = {digest_of(chunk.pieces[0])};
    chunk.error = {};
    return {};
  }

  // Of a tensor with a NaN or an infinity: whoever left it out by name gets it, with a warning.
  Status check_kept(const PlanJob& job) {
    const Status status = check_finite(reader_, *job.tensor);
    if (status.ok() || !job.rule.starts_with("--")) {
      return status;
    }
    const std::lock_guard lock(mutex_);
    if (warned_.insert(job.tensor).second) {
      NIBBLE_LOG(kWarning, "{}: {}, kept as {} says; what it takes part in is no number",
                 reader_.where(*job.tensor), describe_not_finite(*job.tensor), job.rule);
    }
    return {};
  }

  Status write(const Chunk& chunk) {
    const Task& task = chunk.task;
    const PlanJob& job = plan_.jobs[task.job];
    NIBBLE_RETURN_IF_ERROR(store_.begin(job.shard));
    for (size_t slot = 0; slot < job.outputs.size(); ++slot) {
      NIBBLE_RETURN_IF_ERROR(
          store_.write(job, slot, job.place(slot, task.chunk).offset, chunk.pieces[slot]));
    }
    return chunk_done(task, chunk.digests, chunk.error);
  }

  Status chunk_done(const Task& task, const std::vector<Digest>& digests, const RowsError& error) {
    const PlanJob& job = plan_.jobs[task.job];
    const auto index = static_cast<size_t>(task.chunk);
    JobRecord record;
    {
      const std::lock_guard lock(mutex_);
      OpenJob& open = open_[task.job];
      if (open.errors.empty()) {
        open.missing = job.chunk_count();
        open.errors.resize(static_cast<size_t>(open.missing));
        open.digests.assign(job.outputs.size(),
                            std::vector<Digest>(static_cast<size_t>(open.missing)));
      }
      for (size_t output = 0; output < digests.size(); ++output) {
        open.digests[output][index] = digests[output];
      }
      open.errors[index] = error;
      if (--open.missing > 0) {
        report(job, task, nullptr);
        return {};
      }
      for (const std::vector<Digest>& chunks : open.digests) {
        record.digests.push_back(combine_digests(chunks));
      }
      for (const RowsError& chunk : open.errors) {
        record.error.add(chunk);
      }
      open_.erase(task.job);
      report(job, task, &record.error);
    }
    if (job.scattered) {
      drop_pages(job, 0);
    }
    return store_.finish_job(task.job, std::move(record));
  }

  // Under the lock.
  void report(const PlanJob& job, const Task& task, const RowsError* finished) {
    if (!options_.progress) {
      return;
    }
    const int64_t chunks = job.chunk_count();
    progress_.bytes_done +=
        job.bytes_in * (task.chunk + 1) / chunks - job.bytes_in * task.chunk / chunks;
    if (finished != nullptr) {
      progress_.tensor = job.name();
      ++progress_.tensors_done;
      if (job.matrix != nullptr && job.scheme.weight.quantized()) {
        const double snr = finished->snr_db();
        if (progress_.worst_tensor.empty() || snr < progress_.worst_snr_db) {
          progress_.worst_tensor = job.name();
          progress_.worst_snr_db = snr;
        }
      }
    }
    options_.progress(progress_);
  }

  const CheckpointReader& reader_;
  const QuantizePlan& plan_;
  ShardStore& store_;
  const PipelineOptions& options_;
  TaskQueue queue_;
  BoundedQueue<std::unique_ptr<Chunk>> free_;
  BoundedQueue<std::unique_ptr<Chunk>> encoded_;
  std::mutex mutex_;  // open_, progress_, warned_
  std::unordered_map<size_t, OpenJob> open_;
  QuantizeProgress progress_;
  std::set<const TensorInfo*> warned_;
};

}  // namespace

Status run_pipeline(const CheckpointReader& reader,
                    const QuantizePlan& plan,
                    ShardStore& store,
                    const PipelineOptions& options) {
  return Pipeline(reader, plan, store, options).run();
}

}  // namespace nibble
