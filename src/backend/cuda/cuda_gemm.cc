#include "backend/cuda/cuda_gemm.h"

#include <algorithm>
#include <set>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/row_kernels.h"
#include "base/check.h"

namespace nibble::cuda {

bool CudaGemm::takes_rows_as_given(const GemmArgs& args) const {
  return args.input.kind == GemmInput::Kind::kPlain && row_scales(problem_.act, problem_.k) == 0;
}

bool CudaGemm::reads_rows_of(const PreparedGemm& other, int64_t /*m*/) const {
  const auto* rows = dynamic_cast<const CudaGemm*>(&other);
  return rows != nullptr && problem_.act == rows->problem_.act && problem_.k == rows->problem_.k;
}

Status CudaGemm::launch_rounding(const GemmArgs& args) const {
  CHECK_LE(args.m, max_m_);
  const LaunchContext launch{context_.stream};
  const GemmScratch& scratch = context_.scratch;
  const QuantizedRows out{problem_.act, scratch.values(), scratch.scales()};
  if (is_norm(args.input.kind)) {
    CHECK_EQ(args.x_stride, problem_.k);
    return check(
        norm_quantize(
            {.x = args.x.f32(), .norm = args.input, .rows = args.m, .n = problem_.k, .out = out},
            launch),
        "norm");
  }
  CHECK(args.x.type == DType::kBF16);
  if (args.input.kind != GemmInput::Kind::kPlain) {
    return check(activation_quantize({.x = args.x.data,
                                      .kind = args.input.kind,
                                      .stride = args.x_stride,
                                      .rows = args.m,
                                      .n = problem_.k,
                                      .out = out,
                                      .limit = args.input.limit,
                                      .turn = args.input.turn},
                                     launch),
                 "activation");
  }
  if (takes_rows_as_given(args)) {
    CHECK_EQ(args.x_stride, problem_.k);
    return {};
  }
  return check(
      quantize_rows(
          {.x = args.x.data, .stride = args.x_stride, .rows = args.m, .n = problem_.k, .out = out},
          launch),
      "rounding activations");
}

void CudaGemm::round_rows(const GemmArgs& args) { must(launch_rounding(args)); }

void CudaGemm::multiply(const GemmArgs& args) { must(launch_product(args)); }

Status CudaGemm::launch(const GemmArgs& args) {
  NIBBLE_RETURN_IF_ERROR(launch_rounding(args));
  return launch_product(args);
}

Status CudaGemm::launch_product(const GemmArgs& args) const {
  CHECK_LE(args.m, max_m_);
  const GemmScratch& scratch = context_.scratch;
  const bool add = args.output == GemmOutput::kAdd;
  const bool f32 = args.y.type == DType::kF32;
  CHECK(f32 || !add);
  return check(
      packed_->kernel().run({.x = takes_rows_as_given(args) ? args.x.data : scratch.values(),
                             .x_scales = scratch.scales(),
                             .packed = packed_->at(0),
                             .bias = args.bias,
                             .y = args.y.data,
                             .y_stride = args.y_stride,
                             .m = args.m,
                             .result = add   ? GemmResult::kAddF32
                                       : f32 ? GemmResult::kF32
                                             : GemmResult::kBf16,
                             .workspace = scratch.workspace()},
                            {context_.stream}),
      packed_->kernel_name());
}

std::vector<int64_t> CudaGemm::row_counts(int64_t most) const {
  std::vector<int64_t> counts;
  std::set<int> seen;
  // Where there are many rows, choices lie further apart.
  for (int64_t m = 1; m <= std::min(most, max_m_); m += std::max<int64_t>(1, m / 32)) {
    if (seen.insert(packed_->kernel().choose(m)).second) {
      counts.push_back(m);
    }
  }
  return counts;
}

}  // namespace nibble::cuda
