#include "quantizer/job_maker.h"

#include <algorithm>
#include <utility>

#include "base/block_file.h"
#include "base/check.h"
#include "base/math.h"

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

struct RoundedJob::Piece {
  const float* w;
  const RoundedMatrix& rounded;
  int64_t first_row;
};

struct RoundedJob::Chunk {
  int64_t index;
  BlockMemory memory;
  std::vector<std::span<std::byte>> pieces;  // by output
  std::vector<Status> statuses;              // by block of rows
  std::vector<RowsError> errors;
  std::vector<Digest> digests;  // by output
};

RoundedJob::Chunk RoundedJob::make_chunk(int64_t index) const {
  int64_t bytes = 0;
  for (size_t slot = 0; slot < job_.outputs.size(); ++slot) {
    bytes += BlockMemory::needed(job_.place(slot, index).bytes);
  }
  Chunk chunk{index, BlockMemory(bytes), {}, {}, {}, {}};
  for (size_t slot = 0; slot < job_.outputs.size(); ++slot) {
    const MatrixEncoder::Place place = job_.place(slot, index);
    chunk.pieces.push_back(
        chunk.memory.take(job_.outputs[slot].offset + place.offset, place.bytes));
  }
  const auto blocks =
      static_cast<size_t>(ceil_div(job_.chunk(index).count, job_.encoder->row_block()));
  chunk.statuses.resize(blocks);
  chunk.errors.resize(blocks);
  return chunk;
}

// Blocks of rows are encoded side by side: an expert's matrix has few chunks.
Status RoundedJob::add(std::span<const float> w, const RoundedMatrix& rounded, ThreadPool& pool) {
  NIBBLE_RETURN_IF_ERROR(context_.store.begin(job_.shard));
  const Piece piece{w.data(), rounded, job_.chunk(chunk_).begin};
  const int64_t end = piece.first_row + std::ssize(w) / job_.matrix->k();
  std::vector<Chunk> chunks;
  std::vector<std::pair<size_t, int64_t>> blocks;  // chunk, block
  for (; chunk_ < job_.chunk_count() && job_.chunk(chunk_).begin < end; ++chunk_) {
    CHECK_LE(job_.chunk(chunk_).begin + job_.chunk(chunk_).count, end);
    chunks.push_back(make_chunk(chunk_));
    for (int64_t block = 0; block < std::ssize(chunks.back().errors); ++block) {
      blocks.emplace_back(chunks.size() - 1, block);
    }
  }
  pool.parallel_for(std::ssize(blocks), [&](int64_t i, int) {
    const auto& [chunk, block] = blocks[static_cast<size_t>(i)];
    encode_block(piece, block, chunks[chunk]);
  });
  std::vector<Status> written(chunks.size());
  pool.parallel_for(std::ssize(chunks), [&](int64_t i, int) {
    written[static_cast<size_t>(i)] = write_chunk(chunks[static_cast<size_t>(i)]);
  });
  for (size_t i = 0; i < chunks.size(); ++i) {
    NIBBLE_RETURN_IF_ERROR(written[i].with_context(job_.matrix->where()));
    RowsError error;
    for (const RowsError& part : chunks[i].errors) {
      error.add(part);
    }
    error_.add(error);
    for (size_t slot = 0; slot < digests_.size(); ++slot) {
      digests_[slot].push_back(chunks[i].digests[slot]);
    }
  }
  return {};
}

void RoundedJob::encode_block(const Piece& piece, int64_t block, Chunk& chunk) const {
  const PlanJob::Range range = job_.chunk(chunk.index);
  const int64_t done = block * job_.encoder->row_block();
  const PlanJob::Range rows{range.begin + done,
                            std::min(job_.encoder->row_block(), range.count - done)};
  std::vector<std::byte*> out;
  for (size_t slot = 0; slot < chunk.pieces.size(); ++slot) {
    // What belongs to no row is filled by row 0, and takes no place behind it.
    const int64_t before = job_.encoder->place(slot, range.begin, 0).offset;
    const int64_t at = job_.encoder->place(slot, rows.begin, rows.count).offset;
    out.push_back(chunk.pieces[slot].data() + (at - before));
  }
  const auto i = static_cast<size_t>(block);
  chunk.statuses[i] = encode_rows({job_, piece.w, piece.rounded, piece.first_row, extent_}, rows,
                                  out, chunk.errors[i]);
}

Status RoundedJob::write_chunk(Chunk& chunk) const {
  for (const Status& status : chunk.statuses) {
    NIBBLE_RETURN_IF_ERROR(status);
  }
  for (size_t slot = 0; slot < chunk.pieces.size(); ++slot) {
    chunk.digests.push_back(digest_of(chunk.pieces[slot]));
    NIBBLE_RETURN_IF_ERROR(
        context_.store.write(job_, slot, job_.place(slot, chunk.index).offset, chunk.pieces[slot]));
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
