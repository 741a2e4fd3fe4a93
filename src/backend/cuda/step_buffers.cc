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

StepBuffers::Places StepBuffers::place_rows(size_t& end, int64_t rows, int64_t logit_rows) const {
  const int64_t sequences = limits_.sequences;
  Places places;
  places.tokens = place_ints(end, rows);
  places.logit_rows = place_ints(end, logit_rows);
  places.positions = place_ints(end, rows);
  places.row_sequences = place_ints(end, rows);
  places.q_begin = place_ints(end, sequences + 1);
  places.kv_len = place_ints(end, sequences);
  places.prompt_len = place_ints(end, sequences);
  places.end = static_cast<int64_t>(end / sizeof(int32_t));
  return places;
}

Result<StepBuffers> StepBuffers::create(const StepLimits& limits) {
  StepBuffers out;
  out.limits_ = limits;
  out.pages_per_sequence_ = round_up(ceil_div(limits.positions, kSmallestPage), kAlignedPages);
  size_t end = 0;
  out.few_ = out.place_rows(end, std::min(limits.rows, limits.sequences), limits.sequences);
  out.many_ = out.place_rows(end, limits.rows, std::max(limits.logit_rows, limits.sequences));
  out.pages_at_ = place_ints(end, limits.pools * limits.sequences * out.pages_per_sequence_);
  out.sent_pages_.resize(static_cast<size_t>(limits.pools * limits.sequences));
  NIBBLE_ASSIGN_OR_RETURN(out.device_, allocate_zeroed(end, "a step's page tables"));
  NIBBLE_ASSIGN_OR_RETURN(out.pinned_, allocate_pinned(end));
  NIBBLE_ASSIGN_OR_RETURN(out.copied_, make_event());
  out.metadata_ = {.page_table = out.device_int(out.pages_at_),
                   .page_table_stride = out.pages_per_sequence_};
  return out;
}

void StepBuffers::fill(const StepInput& input, const StepShape& shape) {
  auto* host = pinned_.as<int32_t>();
  const Places& at = places();
  const auto rows = std::ssize(input.tokens);
  std::ranges::copy(input.tokens, host + at.tokens);
  std::ranges::copy(input.logit_rows, host + at.logit_rows);
  int32_t sequence = 0;
  for (const SequenceSpan& span : input.sequences) {
    host[at.q_begin + sequence] = span.q_begin;
    host[at.kv_len + sequence] = span.kv_len;
    host[at.prompt_len + sequence] = span.prompt_len;
    for (int32_t i = 0; i < span.q_len; ++i) {
      host[at.positions + span.q_begin + i] = span.kv_len - span.q_len + i;
      host[at.row_sequences + span.q_begin + i] = sequence;
    }
    ++sequence;
  }
  for (int64_t s = sequence; s <= metadata_.sequences; ++s) {
    host[at.q_begin + s] = static_cast<int32_t>(rows);
    if (s < metadata_.sequences) {
      host[at.kv_len + s] = 0;
      host[at.prompt_len + s] = 0;
    }
  }
  for (int64_t row = rows; row < shape.rows; ++row) {
    host[at.tokens + row] = 0;
    host[at.positions + row] = 0;
    host[at.row_sequences + row] = -1;
  }
  for (int64_t i = std::ssize(input.logit_rows); i < shape.logit_rows; ++i) {
    host[at.logit_rows + i] = 0;
  }
}

// Notes the pages of the sequences in one pool.
StepBuffers::ChangedPages StepBuffers::fill_pages(const StepPlan& plan, int64_t pool) {
  const StepInput& input = plan.input;
  auto* host = pinned_.as<int32_t>();
  const auto spans =
      sequences_in_pool(input.sequences, input.other_pools, static_cast<int32_t>(pool));
  ChangedPages changed{.begin = std::ssize(spans)};
  int64_t sequence = 0;
  for (const SequenceSpan& span : spans) {
    const int64_t at = pool * limits_.sequences + sequence;
    const int64_t pages = ceil_div<int64_t>(span.kv_len, plan.page_size);
    int32_t* const row = host + pages_at_ + at * pages_per_sequence_;
    if (pages > sent_pages_[static_cast<size_t>(at)] || !std::equal(row, row + pages, span.pages)) {
      std::copy_n(span.pages, pages, row);
      changed = {.begin = std::min(changed.begin, sequence),
                 .end = sequence + 1,
                 .pages = std::max(changed.pages, pages)};
    }
    ++sequence;
  }
  return changed;
}

Status StepBuffers::copy_pages(const ChangedPages& changed, int64_t pool, cudaStream_t stream) {
  if (changed.begin >= changed.end) {
    return {};
  }
  const auto pitch = static_cast<size_t>(pages_per_sequence_) * sizeof(int32_t);
  const int64_t first = pool * limits_.sequences;
  const int64_t at = pages_at_ + (first + changed.begin) * pages_per_sequence_;
  for (int64_t s = changed.begin; s < changed.end; ++s) {
    int64_t& sent = sent_pages_[static_cast<size_t>(first + s)];
    sent = std::max(sent, changed.pages);
  }
  return check(cudaMemcpy2DAsync(device_int(at), pitch, pinned_.as<int32_t>() + at, pitch,
                                 static_cast<size_t>(changed.pages) * sizeof(int32_t),
                                 static_cast<size_t>(changed.end - changed.begin),
                                 cudaMemcpyHostToDevice, stream),
               "copying page tables");
}

Status StepBuffers::write(const StepPlan& plan, const StepShape& shape, cudaStream_t stream) {
  const StepInput& input = plan.input;
  const auto sequences = std::ssize(input.sequences);
  const bool padded = shape.rows > std::ssize(input.tokens);
  CHECK_GE(plan.page_size, kSmallestPage);
  CHECK_LE(shape.rows, limits_.rows);
  is_many_ = shape.rows > limits_.sequences;
  CHECK(!(is_many_ && input.fed));
  const Places& at = places();
  metadata_.rows = static_cast<int32_t>(shape.rows);
  metadata_.sequences = static_cast<int32_t>(padded ? shape.rows : sequences);
  CHECK_LE(metadata_.sequences, limits_.sequences);
  metadata_.q_begin = device_int(at.q_begin);
  metadata_.kv_len = device_int(at.kv_len);
  metadata_.prompt_len = device_int(at.prompt_len);
  metadata_.row_position = device_int(at.positions);
  metadata_.row_sequence = device_int(at.row_sequences);
  int32_t longest = 0;
  for (const SequenceSpan& span : input.sequences) {
    longest = std::max(longest, span.kv_len);
  }
  metadata_.longest = attention_length(longest);

  NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(copied_.get()), "the step before"));
  fill(input, shape);
  const int64_t begin = input.fed ? at.logit_rows : at.tokens;
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemcpyAsync(device_int(begin), pinned_.as<int32_t>() + begin,
                            static_cast<size_t>(at.end - begin) * sizeof(int32_t),
                            cudaMemcpyHostToDevice, stream),
            "copying a step's input"));
  for (int64_t pool = 0; pool < limits_.pools; ++pool) {
    NIBBLE_RETURN_IF_ERROR(copy_pages(fill_pages(plan, pool), pool, stream));
  }
  return check(cudaEventRecord(copied_.get(), stream), "recording an event");
}

}  // namespace nibble::cuda
