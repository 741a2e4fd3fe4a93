#include "backend/cuda/step_buffers.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kAlignedPages = 64;  // 256 bytes of page numbers

// Places of `count` int32, counted in int32.
int64_t place_ints(size_t& end, int64_t count) {
  return static_cast<int64_t>(place(end, static_cast<size_t>(count) * sizeof(int32_t)) /
                              sizeof(int32_t));
}

}  // namespace

Result<StepBuffers> StepBuffers::create(const StepLimits& limits) {
  StepBuffers out;
  out.limits_ = limits;
  out.pages_per_sequence_ = round_up(ceil_div(limits.positions, kSmallestPage), kAlignedPages);
  size_t end = 0;
  out.tokens_at_ = place_ints(end, limits.rows);
  out.logit_rows_at_ = place_ints(end, limits.sequences);
  out.positions_at_ = place_ints(end, limits.rows);
  out.row_sequences_at_ = place_ints(end, limits.rows);
  out.q_begin_at_ = place_ints(end, limits.sequences + 1);
  out.kv_len_at_ = place_ints(end, limits.sequences);
  out.pages_at_ = place_ints(end, limits.sequences * out.pages_per_sequence_);
  NIBBLE_ASSIGN_OR_RETURN(out.device_, allocate_zeroed(end, "a step's page tables"));
  NIBBLE_ASSIGN_OR_RETURN(out.pinned_, allocate_pinned(end));
  NIBBLE_ASSIGN_OR_RETURN(out.copied_, make_event());
  out.metadata_ = {.q_begin = out.device_int(out.q_begin_at_),
                   .kv_len = out.device_int(out.kv_len_at_),
                   .page_table = out.device_int(out.pages_at_),
                   .page_table_stride = out.pages_per_sequence_,
                   .row_position = out.device_int(out.positions_at_),
                   .row_sequence = out.device_int(out.row_sequences_at_)};
  return out;
}

void StepBuffers::fill(const StepInput& input, const StepShape& shape) {
  auto* host = pinned_.as<int32_t>();
  const auto rows = std::ssize(input.tokens);
  std::ranges::copy(input.tokens, host + tokens_at_);
  std::ranges::copy(input.logit_rows, host + logit_rows_at_);
  int32_t sequence = 0;
  for (const SequenceSpan& span : input.sequences) {
    host[q_begin_at_ + sequence] = span.q_begin;
    host[kv_len_at_ + sequence] = span.kv_len;
    for (int32_t i = 0; i < span.q_len; ++i) {
      host[positions_at_ + span.q_begin + i] = span.kv_len - span.q_len + i;
      host[row_sequences_at_ + span.q_begin + i] = sequence;
    }
    const int64_t pages = ceil_div<int64_t>(span.kv_len, input.page_size);
    std::copy_n(span.pages, pages, host + pages_at_ + sequence * pages_per_sequence_);
    ++sequence;
  }
  for (int64_t s = sequence; s <= metadata_.sequences; ++s) {
    host[q_begin_at_ + s] = static_cast<int32_t>(rows);
    if (s < metadata_.sequences) {
      host[kv_len_at_ + s] = 0;
    }
  }
  for (int64_t row = rows; row < shape.rows; ++row) {
    host[tokens_at_ + row] = 0;
    host[positions_at_ + row] = 0;
    host[row_sequences_at_ + row] = -1;
  }
  for (int64_t i = std::ssize(input.logit_rows); i < shape.logit_rows; ++i) {
    host[logit_rows_at_ + i] = 0;
  }
}

Status StepBuffers::write(const StepInput& input, const StepShape& shape, cudaStream_t stream) {
  const auto sequences = std::ssize(input.sequences);
  const bool padded = shape.rows > std::ssize(input.tokens);
  metadata_.rows = static_cast<int32_t>(shape.rows);
  metadata_.sequences = static_cast<int32_t>(padded ? shape.rows : sequences);
  CHECK_GE(input.page_size, kSmallestPage);
  CHECK_LE(shape.rows, limits_.rows);
  CHECK_LE(metadata_.sequences, limits_.sequences);
  NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(copied_.get()), "the step before"));
  fill(input, shape);
  const auto copy = [&](int64_t at, int64_t count) {
    return check(cudaMemcpyAsync(device_.as<int32_t>() + at, pinned_.as<int32_t>() + at,
                                 static_cast<size_t>(count) * sizeof(int32_t),
                                 cudaMemcpyHostToDevice, stream),
                 "copying a step's input");
  };
  NIBBLE_RETURN_IF_ERROR(copy(0, pages_at_));
  int32_t longest = 0;
  for (const SequenceSpan& span : input.sequences) {
    longest = std::max(longest, span.kv_len);
  }
  metadata_.longest = longest <= kShortAttention ? kShortAttention : INT32_MAX;
  const auto pitch = static_cast<size_t>(pages_per_sequence_) * sizeof(int32_t);
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemcpy2DAsync(
                device_.as<int32_t>() + pages_at_, pitch, pinned_.as<int32_t>() + pages_at_, pitch,
                static_cast<size_t>(ceil_div<int64_t>(longest, input.page_size)) * sizeof(int32_t),
                static_cast<size_t>(sequences), cudaMemcpyHostToDevice, stream),
            "copying page tables"));
  return check(cudaEventRecord(copied_.get(), stream), "recording an event");
}

}  // namespace nibble::cuda
