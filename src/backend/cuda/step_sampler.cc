#include "backend/cuda/step_sampler.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {

Result<StepSampler> StepSampler::create(int64_t max_rows) {
  StepSampler out;
  out.max_rows_ = max_rows;
  const auto rows = static_cast<size_t>(max_rows);
  Places& places = out.places_;
  places.sampling = place(places.end, rows * sizeof(RowSampling));
  places.edit_count = place(places.end, sizeof(int32_t));
  places.edits = place(places.end, kMaxLogitEdits * sizeof(LogitEdit));
  places.tokens = place(places.end, rows * sizeof(int32_t));
  places.status = place(places.end, rows * sizeof(SampleStatus));
  places.logprobs = place(places.end, rows * sizeof(float));
  places.top = place(places.end, rows * kMaxTopLogprobs * sizeof(TopLogprob));
  NIBBLE_ASSIGN_OR_RETURN(out.device_, allocate_zeroed(places.end, "the sampler"));
  for (Copy& copy : out.copies_) {
    NIBBLE_ASSIGN_OR_RETURN(copy.pinned, allocate_pinned(places.end));
    NIBBLE_ASSIGN_OR_RETURN(copy.done, make_event());
  }
  NIBBLE_ASSIGN_OR_RETURN(
      out.workspace_,
      allocate_zeroed(sample_workspace_bytes(max_rows, kMaxLogitEdits), "the sampler"));
  return out;
}

/// Room for a mask of `words` words for every row, here and on the GPU.
Status StepSampler::make_masks(size_t words) {
  const size_t bytes = static_cast<size_t>(max_rows_) * (words + 1) * sizeof(uint32_t);
  if (masks_.size() >= bytes) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(masks_, allocate_zeroed(bytes, "masks of tokens"));
  for (Copy& copy : copies_) {
    NIBBLE_ASSIGN_OR_RETURN(copy.masks, allocate_pinned(bytes));
  }
  return {};
}

Status StepSampler::start(const SamplingInput& input) {
  CHECK_LE(std::ssize(input.rows), max_rows_);
  CHECK_LE(std::ssize(input.edits), kMaxLogitEdits);
  CHECK_LT(started_ - finished_, uint64_t{2});
  Copy& copy = copies_[started_++ % 2];
  copy.rows = std::ssize(input.rows);
  copy.edits = std::ssize(input.edits);
  copy.logprobs =
      std::ranges::any_of(input.rows, [](const RowSampling& row) { return row.logprobs >= 0; });
  copy.draws = std::ranges::any_of(
      input.rows, [](const RowSampling& row) { return row.inverse_temperature != 0.0F; });
  std::ranges::copy(input.rows, copy.at<RowSampling>(places_.sampling));
  *copy.at<int32_t>(places_.edit_count) = static_cast<int32_t>(copy.edits);
  std::ranges::copy(input.edits, copy.at<LogitEdit>(places_.edits));
  copy.mask_words = input.masks.size();
  if (copy.mask_words == 0) {
    return {};
  }
  CHECK_EQ(input.mask_of.size(), input.rows.size());
  const auto masked = static_cast<size_t>(std::ranges::max(input.mask_of) + 1);
  NIBBLE_RETURN_IF_ERROR(make_masks(input.masks.size() / masked));
  auto* const mask_of = copy.masks.as<int32_t>();
  std::fill_n(std::ranges::copy(input.mask_of, mask_of).out, max_rows_ - std::ssize(input.mask_of),
              -1);
  std::ranges::copy(input.masks, copy.masks.as<uint32_t>() + max_rows_);
  return {};
}

int StepSampler::kind() const {
  const Copy& copy = latest();
  return (copy.draws ? 1 : 0) + (copy.logprobs ? 2 : 0) + (copy.edits > 0 ? 4 : 0) +
         (copy.mask_words > 0 ? 8 : 0);
}

Status StepSampler::upload(int64_t rows, cudaStream_t stream) {
  const Copy& copy = latest();
  CHECK_LE(rows, max_rows_);
  std::fill(copy.at<RowSampling>(places_.sampling) + copy.rows,
            copy.at<RowSampling>(places_.sampling) + rows, RowSampling{});
  const size_t bytes = copy.edits > 0
                           ? places_.edits + static_cast<size_t>(copy.edits) * sizeof(LogitEdit)
                           : static_cast<size_t>(rows) * sizeof(RowSampling);
  if (copy.mask_words > 0) {
    const size_t mask_bytes = (static_cast<size_t>(max_rows_) + copy.mask_words) * sizeof(uint32_t);
    NIBBLE_RETURN_IF_ERROR(check(cudaMemcpyAsync(masks_.as<void>(), copy.masks.as<void>(),
                                                 mask_bytes, cudaMemcpyHostToDevice, stream),
                                 "copying masks of tokens"));
  }
  return check(cudaMemcpyAsync(device_.as<void>(), copy.pinned.as<void>(), bytes,
                               cudaMemcpyHostToDevice, stream),
               "copying samples");
}

Status StepSampler::sample(
    float* logits, int64_t vocab, int64_t rows, int32_t* next, cudaStream_t stream) {
  const Copy& copy = latest();
  const bool edits = copy.edits > 0;
  const bool masks = copy.mask_words > 0;
  return check(
      sample_tokens({.range = copy.draws ? SampleRange::kAny : SampleRange::kGreedy,
                     .logits = logits,
                     .stride = vocab,
                     .rows = rows,
                     .vocab = vocab,
                     .sampling = on_device<RowSampling>(places_.sampling),
                     .edits = edits ? on_device<LogitEdit>(places_.edits) : nullptr,
                     .edit_count = edits ? on_device<int32_t>(places_.edit_count) : nullptr,
                     .max_edits = edits ? kMaxLogitEdits : 0,
                     .mask_of = masks ? masks_.as<int32_t>() : nullptr,
                     .masks = masks ? masks_.as<uint32_t>() + max_rows_ : nullptr,
                     .tokens = on_device<int32_t>(places_.tokens),
                     .next = next,
                     .status = on_device<SampleStatus>(places_.status),
                     .logprobs = copy.logprobs ? on_device<float>(places_.logprobs) : nullptr,
                     .top = copy.logprobs ? on_device<TopLogprob>(places_.top) : nullptr,
                     .workspace = workspace_.as<void>(),
                     .max_rows = max_rows_},
                    {stream}),
      "sampling tokens");
}

Status StepSampler::download(cudaStream_t stream) {
  const Copy& copy = latest();
  const size_t end = copy.logprobs ? places_.end : places_.logprobs;
  NIBBLE_RETURN_IF_ERROR(check(
      cudaMemcpyAsync(copy.at<std::byte>(places_.tokens), on_device<std::byte>(places_.tokens),
                      end - places_.tokens, cudaMemcpyDeviceToHost, stream),
      "copying samples"));
  return check(cudaEventRecord(copy.done.get(), stream), "recording an event");
}

Status StepSampler::finish(std::span<SampledRow> out) {
  CHECK_LT(finished_, started_);
  const Copy& copy = copies_[finished_++ % 2];
  CHECK_EQ(std::ssize(out), copy.rows);
  NIBBLE_RETURN_IF_ERROR(check(cudaEventSynchronize(copy.done.get()), "a step"));
  for (size_t row = 0; row < out.size(); ++row) {
    out[row].token = copy.at<int32_t>(places_.tokens)[row];
    out[row].status = copy.at<SampleStatus>(places_.status)[row];
    if (copy.at<RowSampling>(places_.sampling)[row].logprobs >= 0) {
      out[row].logprob = copy.at<float>(places_.logprobs)[row];
      std::copy_n(copy.at<TopLogprob>(places_.top) + row * kMaxTopLogprobs, kMaxTopLogprobs,
                  out[row].top.begin());
    }
  }
  return {};
}

}  // namespace nibble::cuda
