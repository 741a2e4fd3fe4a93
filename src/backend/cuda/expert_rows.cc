// Rows of experts for sums of a calibration.

#include <algorithm>
#include <vector>

#include "backend/cuda/calibration/cuda_site.h"
#include "backend/cuda/cuda_experts.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {

InputRounding CudaExperts::down_input(int64_t slots) const {
  const ConstActivations x(memory_.gate_up.as<void>(), DType::kBF16);
  if (activates_) {
    return {.x = x, .input = {}, .stride = down_.k, .rows = slots, .k = down_.k};
  }
  return {.x = x,
          .input = {.kind = form_.activation, .limit = form_.limit},
          .stride = input_width(form_.activation, down_.k),
          .rows = slots,
          .k = down_.k};
}

std::vector<int64_t> CudaExperts::rows_of_experts(int64_t rows) const {
  std::vector<int32_t> chosen(static_cast<size_t>(rows * form_.top_k));
  must(cudaMemcpyAsync(chosen.data(), memory_.chosen.as<void>(), chosen.size() * sizeof(int32_t),
                       cudaMemcpyDeviceToHost, context_.stream),
       "copying the choice of experts");
  must(cudaStreamSynchronize(context_.stream), "a step");
  std::vector<int64_t> counts(static_cast<size_t>(experts_));
  for (const int32_t expert : chosen) {
    ++counts.at(static_cast<size_t>(expert));
  }
  return counts;
}

void CudaExperts::add_rows(const ExpertView& view, std::span<SiteMath* const> sums) {
  CHECK_LE(view.m, max_m_);
  CHECK_EQ(std::ssize(sums), experts_);
  CHECK(view.x.type == DType::kBF16 && view.x_stride == gate_up_.k);
  CHECK(view.x.data == view.chosen_by.data);
  CHECK_MSG(gate_up_.all == nullptr, "kernels that compute all experts order no rows");
  const auto wanted = std::ranges::find_if(sums, [](const SiteMath* site) { return site; });
  if (wanted == sums.end()) {
    return;
  }
  const ExpertArgs args{.x = view.x, .x_stride = view.x_stride, .m = view.m};
  const int64_t slots = view.m * form_.top_k;
  cut_tiles(view.m);
  choose(args);
  InputRounding rows{.x = {memory_.x.as<void>(), DType::kBF16},
                     .input = {},
                     .stride = gate_up_.k,
                     .rows = slots,
                     .k = gate_up_.k};
  if (view.part == ExpertPart::kDown) {
    scatter(args);
    multiply(gate_up_, {memory_.x.as<void>()}, slots);
    rows = down_input(slots);
  } else {
    must(scatter_rows({.from = view.x.data,
                       .slot_of = memory_.slot_of.as<int32_t>(),
                       .top_k = static_cast<int32_t>(form_.top_k),
                       .rows = view.m,
                       .row_bytes = gate_up_.k * 2,
                       .to = memory_.x.as<void>()},
                      {context_.stream}),
         "copying rows");
  }
  const std::vector<int64_t> counts = rows_of_experts(view.m);
  auto& first = dynamic_cast<CudaSite&>(**wanted);
  CalibrationWork& work = first.work();
  rows.out.format = first.act();
  work.sums_timer.start(context_.stream);
  const SplitRows all = work.prepare(rows);
  int64_t begin = 0;
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    const auto at = [&](const void* matrix) {
      return matrix == nullptr ? nullptr
                               : static_cast<const std::byte*>(matrix) + 2 * begin * rows.k;
    };
    if (sums[expert] != nullptr) {
      dynamic_cast<CudaSite&>(*sums[expert]).add_rows({at(all.high), at(all.low)}, counts[expert]);
    }
    begin += counts[expert];
  }
  work.sums_timer.stop(context_.stream);
}

}  // namespace nibble::cuda
