#include "quantizer/pipeline.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

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
        progress_(options.begin) {}

  Status run() {
    std::vector<std::thread> helpers;
    for (int i = 1; i < options_.budget.threads; ++i) {
      helpers.emplace_back([this] { work(); });
    }
    work();
    for (std::thread& helper : helpers) {
      helper.join();
    }
    NIBBLE_RETURN_IF_ERROR(queue_.failure());
    if (stop_asked()) {
      return make_error(StatusCode::kCancelled, "stopped");
    }
    return {};
  }

 private:
  // One thread's buffers.
  struct Buffers {
    std::vector<float> values;
    std::vector<std::byte> output;
    std::vector<std::byte*> begins;  // by slot: where the chunk's piece begins in `output`
    std::vector<std::byte*> next;    // by slot: where the next rows go
    std::vector<std::span<const std::byte>> ahead;
  };

  [[nodiscard]] bool stop_asked() const { return options_.stop != nullptr && *options_.stop; }

  void work() {
    Buffers buffers;
    buffers.values.resize(static_cast<size_t>(options_.budget.value_bytes) / sizeof(float));
    buffers.output.resize(static_cast<size_t>(options_.budget.output_bytes));
    while (true) {
      if (stop_asked()) {
        queue_.stop();
      }
      const auto task = queue_.next(buffers.ahead);
      if (!task) {
        return;
      }
      for (const auto& part : buffers.ahead) {
        reader_.read_ahead(part);
      }
      const Status status = do_task(*task, buffers);
      if (!status.ok()) {
        queue_.fail(*task, status);
      }
    }
  }

  Status do_task(const Task& task, Buffers& buffers) {
    const PlanJob& job = plan_.jobs[task.job];
    Status status;
    if (task.kind == Task::Kind::kMeasure) {
      status = measure(task, buffers);
    } else {
      NIBBLE_RETURN_IF_ERROR(store_.begin(job.shard));
      status = job.matrix != nullptr ? encode(task, buffers) : copy(task);
    }
    if (!job.scattered) {
      drop_pages(job, task.chunk);
    }
    return status;
  }

  void drop_pages(const PlanJob& job, int64_t chunk) const {
    for (const auto& part : job.touched(chunk)) {
      reader_.drop_pages(part);
    }
  }

  // Calls fn(row, rows, values) for the decoded rows of a chunk.
  template <typename Fn>
  Status for_rows(const Task& task, Buffers& buffers, const Fn& fn) {
    const PlanJob& job = plan_.jobs[task.job];
    const PlanJob::Range range = job.chunk(task.chunk);
    const int64_t step = rows_at_once(job);
    for (int64_t row = range.begin; row < range.begin + range.count; row += step) {
      const int64_t rows = std::min(step, range.begin + range.count - row);
      NIBBLE_RETURN_IF_ERROR(job.matrix->decode(row, rows, buffers.values.data()));
      const Status status = fn(row, rows, buffers.values.data());
      NIBBLE_RETURN_IF_ERROR(status.with_context(job.matrix->where()));
    }
    return {};
  }

  Status measure(const Task& task, Buffers& buffers) {
    const int64_t k = plan_.jobs[task.job].matrix->k();
    float largest = 0;
    NIBBLE_RETURN_IF_ERROR(
        for_rows(task, buffers, [&](int64_t row, int64_t rows, const float* x) -> Status {
          NIBBLE_ASSIGN_OR_RETURN(const float absmax, absmax_of(x, row, rows, k));
          largest = std::max(largest, absmax);
          return {};
        }));
    queue_.measured(task, largest);
    return {};
  }

  Status encode(const Task& task, Buffers& buffers) {
    const auto extent = queue_.extent_of(task.job);
    if (!extent) {
      return {};  // another thread failed or was stopped; its report stands
    }
    const PlanJob& job = plan_.jobs[task.job];
    std::byte* at = buffers.output.data();
    buffers.begins.clear();
    for (size_t slot = 0; slot < job.outputs.size(); ++slot) {
      buffers.begins.push_back(at);
      at += job.place(slot, task.chunk).bytes;
    }
    buffers.next = buffers.begins;
    RowsError error;
    NIBBLE_RETURN_IF_ERROR(for_rows(task, buffers, [&](int64_t row, int64_t rows, const float* x) {
      return encode_rows(job, {row, rows}, x, *extent, buffers, error);
    }));
    std::vector<Digest> digests;
    for (size_t slot = 0; slot < job.outputs.size(); ++slot) {
      const MatrixEncoder::Place place = job.place(slot, task.chunk);
      const std::span<const std::byte> bytes(buffers.begins[slot],
                                             static_cast<size_t>(place.bytes));
      digests.push_back(digest_of(bytes));
      NIBBLE_RETURN_IF_ERROR(store_.write(job, slot, place.offset, bytes));
    }
    return chunk_done(task, digests, error);
  }

  static Status encode_rows(const PlanJob& job,
                            PlanJob::Range rows,
                            const float* x,
                            const Extent& extent,
                            Buffers& buffers,
                            RowsError& error) {
    const int64_t block = job.encoder->row_block();
    for (int64_t done = 0; done < rows.count; done += block) {
      const int64_t row = rows.begin + done;
      const int64_t count = std::min(block, rows.count - done);
      RowsError part;
      NIBBLE_RETURN_IF_ERROR(
          job.encoder->encode(row, count, x + done * job.matrix->k(), extent, buffers.next, part));
      error.add(part);
      for (size_t slot = 0; slot < buffers.next.size(); ++slot) {
        buffers.next[slot] += job.encoder->place(slot, row, count).bytes;
      }
    }
    return {};
  }

  Status copy(const Task& task) {
    const PlanJob& job = plan_.jobs[task.job];
    const PlanJob::Range range = job.chunk(task.chunk);
    const auto bytes = job.tensor->data.subspan(static_cast<size_t>(range.begin),
                                                static_cast<size_t>(range.count));
    const std::vector<Digest> digests = {digest_of(bytes)};
    NIBBLE_RETURN_IF_ERROR(store_.write(job, 0, range.begin, bytes));
    return chunk_done(task, digests, {});
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
  std::mutex mutex_;  // open_, progress_
  std::unordered_map<size_t, OpenJob> open_;
  QuantizeProgress progress_;
};

}  // namespace

Status run_pipeline(const CheckpointReader& reader,
                    const QuantizePlan& plan,
                    ShardStore& store,
                    const PipelineOptions& options) {
  return Pipeline(reader, plan, store, options).run();
}

}  // namespace nibble
