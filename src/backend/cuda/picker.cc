#include "backend/cuda/picker.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {

Result<Picker> Picker::create(int64_t max_rows) {
  Picker out;
  out.max_rows_ = max_rows;
  const auto rows = static_cast<size_t>(max_rows);
  Places& places = out.places_;
  places.sampling = place(places.end, rows * sizeof(RowSampling));
  places.edit_count = place(places.end, sizeof(int32_t));
  places.edits = place(places.end, kMaxLogitEdits * sizeof(LogitEdit));
  places.tokens = place(places.end, rows * sizeof(int32_t));
  places.status = place(places.end, rows * sizeof(PickStatus));
  places.logprobs = place(places.end, rows * sizeof(float));
  places.top = place(places.end, rows * kMaxTopLogprobs * sizeof(TopLogprob));
  NIBBLE_ASSIGN_OR_RETURN(out.device_, allocate_zeroed(places.end, "the sampler"));
  NIBBLE_ASSIGN_OR_RETURN(out.pinned_, allocate_pinned(places.end));
  NIBBLE_ASSIGN_OR_RETURN(
      out.workspace_,
      allocate_zeroed(sample_workspace_bytes(max_rows, kMaxLogitEdits), "the sampler"));
  return out;
}

Status Picker::pick(float* logits,
                    int64_t vocab,
                    const PickInput& input,
                    std::span<PickedRow> out,
                    cudaStream_t stream) {
  const auto rows = std::ssize(input.rows);
  const auto edits = std::ssize(input.edits);
  CHECK_LE(rows, max_rows_);
  CHECK_LE(edits, kMaxLogitEdits);
  CHECK_EQ(std::ssize(out), rows);
  const bool logprobs =
      std::ranges::any_of(input.rows, [](const RowSampling& row) { return row.logprobs >= 0; });
  const bool draws = std::ranges::any_of(
      input.rows, [](const RowSampling& row) { return row.inverse_temperature != 0.0F; });
  std::ranges::copy(input.rows, on_host<RowSampling>(places_.sampling));
  *on_host<int32_t>(places_.edit_count) = static_cast<int32_t>(edits);
  std::ranges::copy(input.edits, on_host<LogitEdit>(places_.edits));
  const auto copy = [&](size_t from, size_t bytes, cudaMemcpyKind kind) {
    const bool up = kind == cudaMemcpyHostToDevice;
    std::byte* device = on_device<std::byte>(from);
    std::byte* host = on_host<std::byte>(from);
    return check(cudaMemcpyAsync(up ? device : host, up ? host : device, bytes, kind, stream),
                 "copying picks");
  };
  const size_t sent =
      edits > 0 ? places_.edits + input.edits.size_bytes() : input.rows.size_bytes();
  NIBBLE_RETURN_IF_ERROR(copy(0, sent, cudaMemcpyHostToDevice));
  NIBBLE_RETURN_IF_ERROR(check(
      sample_tokens({.range = draws ? PickRange::kAny : PickRange::kGreedy,
                     .logits = logits,
                     .stride = vocab,
                     .rows = rows,
                     .vocab = vocab,
                     .sampling = on_device<RowSampling>(places_.sampling),
                     .edits = edits > 0 ? on_device<LogitEdit>(places_.edits) : nullptr,
                     .edit_count = edits > 0 ? on_device<int32_t>(places_.edit_count) : nullptr,
                     .max_edits = edits > 0 ? kMaxLogitEdits : 0,
                     .tokens = on_device<int32_t>(places_.tokens),
                     .status = on_device<PickStatus>(places_.status),
                     .logprobs = logprobs ? on_device<float>(places_.logprobs) : nullptr,
                     .top = logprobs ? on_device<TopLogprob>(places_.top) : nullptr,
                     .workspace = workspace_.as<void>(),
                     .max_rows = max_rows_},
                    {stream, false}),
      "picking tokens"));
  const size_t back = (logprobs ? places_.end : places_.logprobs) - places_.tokens;
  NIBBLE_RETURN_IF_ERROR(copy(places_.tokens, back, cudaMemcpyDeviceToHost));
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "a step"));
  collect(input, out);
  return {};
}

void Picker::collect(const PickInput& input, std::span<PickedRow> out) const {
  for (size_t row = 0; row < out.size(); ++row) {
    out[row].token = on_host<int32_t>(places_.tokens)[row];
    out[row].status = on_host<PickStatus>(places_.status)[row];
    if (input.rows[row].logprobs >= 0) {
      out[row].logprob = on_host<float>(places_.logprobs)[row];
      std::copy_n(on_host<TopLogprob>(places_.top) + row * kMaxTopLogprobs, kMaxTopLogprobs,
                  out[row].top.begin());
    }
  }
}

}  // namespace nibble::cuda
