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

void CudaExperts::begin_view(const ExpertView& view) {
  CHECK_LE(view.m, max_m_);
  CHECK(view.x.type == DType::kBF16 && view.x_stride == gate_up_.k);
  CHECK_MSG(gate_up_.all == nullptr, "kernels that compute all experts order no rows");
  cut_tiles(view.m);
  choose({.x = view.chosen_by, .x_stride = view.x_stride, .m = view.m});
}

void CudaExperts::scatter_plain(const void* rows, int64_t count, void* to) const {
  must(scatter_rows({.from = rows,
                     .slot_of = memory_.slot_of.as<int32_t>(),
                     .top_k = static_cast<int32_t>(form_.top_k),
                     .rows = count,
                     .row_bytes = gate_up_.k * 2,
                     .to = to},
                    {context_.stream}),
       "copying rows");
}

InputRounding CudaExperts::rows_of_view(const ExpertView& view) {
  const int64_t slots = view.m * form_.top_k;
  if (view.part == ExpertPart::kDown) {
    scatter({.x = view.x, .x_stride = view.x_stride, .m = view.m});
    multiply(gate_up_, {memory_.x.as<void>()}, slots);
    return down_input(slots);
  }
  scatter_plain(view.x.data, view.m, memory_.x.as<void>());
  return {.x = {memory_.x.as<void>(), DType::kBF16},
          .input = {},
          .stride = gate_up_.k,
          .rows = slots,
          .k = gate_up_.k};
}

void CudaExperts::keep_down_rows(const ExpertView& view, void* out) {
  CHECK(view.part == ExpertPart::kDown);
  begin_view(view);
  InputRounding rows = rows_of_view(view);
  rows.out = {.format = ActFormat::kBf16, .values = out};
  must(round_input(rows, {context_.stream, false}));
  if (rows.nothing_to_do()) {
    must(cudaMemcpyAsync(out, rows.x.data, static_cast<size_t>(rows.rows * rows.k) * 2,
                         cudaMemcpyDeviceToDevice, context_.stream),
         "copying rows");
  }
}

void CudaExperts::add_rows(const ExpertView& view, std::span<SiteMath* const> sums) {
  add_rows_and_drifts(view, sums, nullptr);
}

void CudaExperts::add_rows_and_drifts(const ExpertView& view,
                                      std::span<SiteMath* const> sums,
                                      const void* wanted) {
  CHECK_EQ(std::ssize(sums), experts_);
  CHECK(view.x.data == view.chosen_by.data);
  const auto any = std::ranges::find_if(sums, [](const SiteMath* site) { return site; });
  if (any == sums.end()) {
    return;
  }
  begin_view(view);
  InputRounding rows = rows_of_view(view);
  const void* of_slots = wanted;
  if (wanted != nullptr && view.part == ExpertPart::kGateUp) {
    scatter_plain(wanted, view.m, memory_.down.as<void>());  // which has room and is not in use
    of_slots = memory_.down.as<void>();
  }
  const std::vector<int64_t> counts = rows_of_experts(view.m);
  auto& first = dynamic_cast<CudaSite&>(**any);
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
      auto& site = dynamic_cast<CudaSite&>(*sums[expert]);
      const SplitRows some{at(all.high), at(all.low)};
      site.add_rows(some, counts[expert]);
      if (of_slots != nullptr) {
        site.add_drift_rows(some, at(of_slots), counts[expert]);
      }
    }
    begin += counts[expert];
  }
  work.sums_timer.stop(context_.stream);
}

}  // namespace nibble::cuda
