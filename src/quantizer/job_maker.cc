#include "quantizer/job_maker.h"

#include <algorithm>
#include <utility>

#include "base/block_file.h"

namespace nibble {
namespace {

/// One matrix on its way into the store.
class RoundedJob final {
 public:
  RoundedJob(const PlanJob& job, const std::vector<float>& w, const RoundedMatrix& rounded)
      : job_(job), w_(w), rounded_(rounded), digests_(job.outputs.size()) {}

  Status write(ShardStore& store) {
    const int64_t k = job_.matrix->k();
    NIBBLE_ASSIGN_OR_RETURN(extent_.absmax, absmax_of(w_.data(), 0, job_.matrix->n(), k));
    NIBBLE_RETURN_IF_ERROR(store.begin(job_.shard));
    for (int64_t chunk = 0; chunk < job_.chunk_count(); ++chunk) {
      NIBBLE_RETURN_IF_ERROR(write_chunk(chunk, store));
    }
    return {};
  }

  [[nodiscard]] JobRecord record() const {
    JobRecord record;
    for (const std::vector<Digest>& chunks : digests_) {
      record.digests.push_back(combine_digests(chunks));
    }
    record.error = error_;
    record.calibration = {std::string(rounding_name(rounded_.rounding)), rounded_.error,
                          rounded_.rtn_error};
    return record;
  }

 private:
  Status write_chunk(int64_t chunk, ShardStore& store) {
    int64_t bytes = 0;
    for (size_t slot = 0; slot < job_.outputs.size(); ++slot) {
      bytes += BlockMemory::needed(job_.place(slot, chunk).bytes);
    }
    BlockMemory memory(bytes);
    std::vector<std::span<std::byte>> pieces;
    std::vector<std::byte*> next;
    for (size_t slot = 0; slot < job_.outputs.size(); ++slot) {
      const MatrixEncoder::Place place = job_.place(slot, chunk);
      pieces.push_back(memory.take(job_.outputs[slot].offset + place.offset, place.bytes));
      next.push_back(pieces.back().data());
    }
    RowsError error;
    const PlanJob::Range range = job_.chunk(chunk);
    const int64_t block = job_.encoder->row_block();
    for (int64_t done = 0; done < range.count; done += block) {
      const int64_t row = range.begin + done;
      const int64_t rows = std::min(block, range.count - done);
      RowsError part;
      NIBBLE_RETURN_IF_ERROR(encode(row, rows, next, part));
      error.add(part);
      for (size_t slot = 0; slot < next.size(); ++slot) {
        next[slot] += job_.encoder->place(slot, row, rows).bytes;
      }
    }
    error_.add(error);
    for (size_t slot = 0; slot < pieces.size(); ++slot) {
      digests_[slot].push_back(digest_of(pieces[slot]));
      NIBBLE_RETURN_IF_ERROR(store.write(job_, slot, job_.place(slot, chunk).offset, pieces[slot]));
    }
    return {};
  }

  // What is nearest is left to the encoder, so that its bytes are those without calibration.
  Status encode(int64_t row, int64_t rows, std::span<std::byte* const> out, RowsError& error) {
    const int64_t k = job_.matrix->k();
    const float* x = w_.data() + row * k;
    if (rounded_.rounding == Rounding::kRtn) {
      return job_.encoder->encode(row, rows, x, extent_, out, error);
    }
    const int64_t groups = job_.scheme.weight.groups(k);
    const float* zeros = rounded_.zeros.empty() ? nullptr : rounded_.zeros.data() + row * groups;
    return job_.encoder->encode_given({.row = row,
                                       .rows = rows,
                                       .x = x,
                                       .values = rounded_.values.data() + row * k,
                                       .scales = rounded_.scales.data() + row * groups,
                                       .zeros = zeros},
                                      extent_, out, error);
  }

  const PlanJob& job_;
  const std::vector<float>& w_;
  const RoundedMatrix& rounded_;
  Extent extent_;
  std::vector<std::vector<Digest>> digests_;  // by output, then chunk
  RowsError error_;
};

}  // namespace

Status store_rounded(const JobMakerContext& context,
                     size_t job,
                     const std::vector<float>& w,
                     const RoundedMatrix& rounded) {
  RoundedJob work(context.plan.jobs[job], w, rounded);
  const Status written = work.write(context.store);
  NIBBLE_RETURN_IF_ERROR(written.with_context(context.plan.jobs[job].matrix->where()));
  return context.store.finish_job(job, work.record());
}

}  // namespace nibble
