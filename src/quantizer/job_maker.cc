#include "quantizer/job_maker.h"

#include <algorithm>
#include <utility>

#include "base/block_file.h"
#include "base/check.h"

namespace nibble {
namespace {

/// Rows of a piece on their way into the outputs of a chunk.
struct RowsToEncode {
  const PlanJob& job;
  const float* w;  // of the piece
  const RoundedMatrix& rounded;
  int64_t piece = 0;  // its first row
  const Extent& extent;
};

// What is nearest is left to the encoder, so that its bytes are those without calibration.
Status encode_rows(const RowsToEncode& from,
                   const PlanJob::Range& rows,
                   std::span<std::byte* const> out,
                   RowsError& error) {
  const PlanJob& job = from.job;
  const RoundedMatrix& rounded = from.rounded;
  const int64_t k = job.matrix->k();
  const int64_t at = rows.begin - from.piece;
  const float* x = from.w + at * k;
  if (rounded.rounding == Rounding::kRtn) {
    return job.encoder->encode(rows.begin, rows.count, x, from.extent, out, error);
  }
  const int64_t groups = job.scheme.weight.groups(k);
  return job.encoder->encode_given(
      {.row = rows.begin,
       .rows = rows.count,
       .x = x,
       .values = rounded.values.data() + at * k,
       .scales = rounded.scales.data() + at * groups,
       .zeros = rounded.zeros.empty() ? nullptr : rounded.zeros.data() + at * groups},
      from.extent, out, error);
}

}  // namespace

int64_t piece_rows(const PlanJob& job, int64_t weights) {
  const int64_t chunk = job.chunk(0).count;
  return std::max<int64_t>(1, weights / (chunk * job.matrix->k())) * chunk;
}

RoundedJob::RoundedJob(const JobMakerContext& context, size_t job, float absmax)
    : context_(context),
      index_(job),
      job_(context.plan.jobs[job]),
      extent_{.absmax = absmax},
      digests_(job_.outputs.size()) {}

Status RoundedJob::add(std::span<const float> w, const RoundedMatrix& rounded, ThreadPool& pool) {
  NIBBLE_RETURN_IF_ERROR(context_.store.begin(job_.shard));
  const Piece piece{w.data(), rounded, job_.chunk(chunk_).begin};
  const int64_t end = piece.first_row + std::ssize(w) / job_.matrix->k();
  std::vector<Chunk> chunks;
  while (chunk_ + std::ssize(chunks) < job_.chunk_count() &&
         job_.chunk(chunk_ + std::ssize(chunks)).begin < end) {
    const PlanJob::Range range = job_.chunk(chunk_ + std::ssize(chunks));
    CHECK_LE(range.begin + range.count, end);
    chunks.emplace_back();
  }
  pool.parallel_for(std::ssize(chunks), [&](int64_t i, int) {
    Chunk& chunk = chunks[static_cast<size_t>(i)];
    chunk.status = write_chunk(piece, chunk_ + i, chunk);
  });
  for (const Chunk& chunk : chunks) {
    NIBBLE_RETURN_IF_ERROR(chunk.status.with_context(job_.matrix->where()));
    error_.add(chunk.error);
    for (size_t slot = 0; slot < chunk.digests.size(); ++slot) {
      digests_[slot].push_back(chunk.digests[slot]);
    }
  }
  chunk_ += std::ssize(chunks);
  return {};
}

Status RoundedJob::write_chunk(const Piece& piece, int64_t index, Chunk& chunk) const {
  int64_t bytes = 0;
  for (size_t slot = 0; slot < job_.outputs.size(); ++slot) {
    bytes += BlockMemory::needed(job_.place(slot, index).bytes);
  }
  BlockMemory memory(bytes);
  std::vector<std::span<std::byte>> pieces;
  std::vector<std::byte*> next;
  for (size_t slot = 0; slot < job_.outputs.size(); ++slot) {
    const MatrixEncoder::Place place = job_.place(slot, index);
    pieces.push_back(memory.take(job_.outputs[slot].offset + place.offset, place.bytes));
    next.push_back(pieces.back().data());
  }
  const PlanJob::Range range = job_.chunk(index);
  const int64_t block = job_.encoder->row_block();
  for (int64_t done = 0; done < range.count; done += block) {
    const PlanJob::Range rows{range.begin + done, std::min(block, range.count - done)};
    RowsError part;
    NIBBLE_RETURN_IF_ERROR(encode_rows({job_, piece.w, piece.rounded, piece.first_row, extent_},
                                       rows, next, part));
    chunk.error.add(part);
    for (size_t slot = 0; slot < next.size(); ++slot) {
      next[slot] += job_.encoder->place(slot, rows.begin, rows.count).bytes;
    }
  }
  for (size_t slot = 0; slot < pieces.size(); ++slot) {
    chunk.digests.push_back(digest_of(pieces[slot]));
    NIBBLE_RETURN_IF_ERROR(
        context_.store.write(job_, slot, job_.place(slot, index).offset, pieces[slot]));
  }
  return {};
}

Status RoundedJob::finish(CalibrationRecord calibration) {
  CHECK_EQ(chunk_, job_.chunk_count());
  JobRecord record;
  for (const std::vector<Digest>& chunks : digests_) {
    record.digests.push_back(combine_digests(chunks));
  }
  record.error = error_;
  record.calibration = std::move(calibration);
  return context_.store.finish_job(index_, std::move(record));
}

}  // namespace nibble
