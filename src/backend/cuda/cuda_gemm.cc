#include "backend/cuda/cuda_gemm.h"

#include <algorithm>
#include <set>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/step_branch.h"
#include "base/check.h"

namespace nibble::cuda {

Status CudaGemm::prepare_branch() {
  if (context_.branch != nullptr) {
    NIBBLE_RETURN_IF_ERROR(context_.branch->reserve(packed_->kernel(), problem_, max_m_));
    branch_prepared_ = true;
  }
  return {};
}

bool CudaGemm::in_branch() const { return context_.branch != nullptr && context_.branch->open(); }

const GemmScratch& CudaGemm::scratch() const {
  CHECK(!in_branch() || branch_prepared_);
  return in_branch() ? context_.branch->scratch() : context_.scratch;
}

LaunchContext CudaGemm::next() const {
  return in_branch() ? context_.branch->next() : LaunchContext{.stream = context_.stream};
}

InputRounding CudaGemm::rounding_of(const GemmArgs& args) const {
  return {.x = args.x,
          .input = args.input,
          .stride = args.x_stride,
          .rows = args.m,
          .k = problem_.k,
          .out = {problem_.act, scratch().values(), scratch().scales(),
                  blocks_ != nullptr ? blocks_->view() : IntBlocks()}};
}

bool CudaGemm::reads_rows_of(const PreparedGemm& other, int64_t /*m*/) const {
  const auto* rows = dynamic_cast<const CudaGemm*>(&other);
  return rows != nullptr && problem_.act == rows->problem_.act && problem_.k == rows->problem_.k &&
         (blocks_ == nullptr || blocks_->same_rows(*rows->blocks_));
}

Status CudaGemm::launch_rounding(const GemmArgs& args) const {
  CHECK_LE(args.m, max_m_);
  const InputRounding rounding = rounding_of(args);
  // Where nothing is launched, the next kernel is still to come.
  return round_input(rounding, rounding.nothing_to_do() ? LaunchContext() : next());
}

void CudaGemm::round_rows(const GemmArgs& args) { must(launch_rounding(args)); }

void CudaGemm::multiply(const GemmArgs& args) { must(launch_product(args)); }

Status CudaGemm::launch(const GemmArgs& args) {
  NIBBLE_RETURN_IF_ERROR(launch_rounding(args));
  return launch_product(args);
}

Status CudaGemm::launch_product(const GemmArgs& args) const {
  CHECK_LE(args.m, max_m_);
  const bool add = args.output == GemmOutput::kAdd;
  const bool f32 = args.y.type == DType::kF32;
  CHECK(f32 || !add);
  return check(packed_->kernel().run(
                   {.x = rounding_of(args).nothing_to_do() ? args.x.data : scratch().values(),
                    .x_scales = scratch().scales(),
                    .blocks = blocks_ != nullptr ? &blocks_->view() : nullptr,
                    .packed = packed_->at(0),
                    .bias = args.bias,
                    .y = args.y.data,
                    .y_stride = args.y_stride,
                    .m = args.m,
                    .result = add   ? GemmResult::kAddF32
                              : f32 ? GemmResult::kF32
                                    : GemmResult::kBf16,
                    .workspace = scratch().workspace()},
                   next()),
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
