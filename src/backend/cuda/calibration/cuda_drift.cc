#include "backend/cuda/calibration/cuda_drift.h"

#include <utility>

#include "backend/calibration_math.h"
#include "backend/cuda/calibration/copies.h"
#include "backend/cuda/calibration/drift_kernels.h"
#include "backend/cuda/cuda_status.h"

namespace nibble::cuda {

Result<std::unique_ptr<CudaDrift>> CudaDrift::create(CalibrationWork& work, int64_t k) {
  std::unique_ptr<CudaDrift> drift(new CudaDrift(work, k));
  NIBBLE_ASSIGN_OR_RETURN(drift->sums_,
                          allocate_zeroed(static_cast<size_t>(CalibrationMath::site_bytes(k)),
                                          "the drift of a calibration"));
  return drift;
}

// D row by row is its transpose column by column: X^T (F - X).
void CudaDrift::add(const SplitRows& x, const void* wanted, int64_t count) {
  if (count == 0) {
    return;
  }
  must(work_.room(work_.changes_high, count * k_ * 2, "rows of a calibration"));
  must(work_.room(work_.changes_low, count * k_ * 2, "rows of a calibration"));
  const void* high = work_.changes_high.as<void>();
  const void* low = work_.changes_low.as<void>();
  must(split_changes({.wanted = wanted,
                      .x_high = x.high,
                      .x_low = x.low,
                      .count = count * k_,
                      .high = work_.changes_high.as<void>(),
                      .low = work_.changes_low.as<void>()},
                     work_.stream),
       "changes of rows");
  for (const auto& [rows, changes] :
       {std::pair(x.high, high), std::pair(x.high, low), std::pair(x.low, high)}) {
    if (rows != nullptr) {
      work_.multiply({.type = MatmulShape::Type::kBf16,
                      .transpose_b = true,
                      .m = k_,
                      .n = k_,
                      .k = count,
                      .lda = k_,
                      .ldb = k_,
                      .ldc = k_},
                     {.a = rows, .b = changes, .c = sums_.as<float>(), .beta = 1.0F});
    }
  }
}

void CudaDrift::add_sums(const CudaDrift& other, double factor) {
  must(add_scaled(other.sums(), factor, k_ * k_, sums_.as<float>(), work_.stream), "adding sums");
}

// From the last columns on: a block by the inverse of the factor's, then what it takes off the
// columns in front.
Result<bool> CudaDrift::solve(float share) {
  share_ = share;
  NIBBLE_RETURN_IF_ERROR(
      work_.room(work_.asked, CalibrationMath::site_bytes(k_), "what a drift asks for"));
  NIBBLE_RETURN_IF_ERROR(work_.room(work_.panel, k_ * kFactorBlock * 4, "a factor's panel"));
  must(cudaMemsetAsync(work_.failed.as<void>(), 0, sizeof(int32_t), work_.stream), "a flag");
  must(order_sums({.from = sums_.as<float>(),
                   .order = work_.factored.device_order,
                   .k = k_,
                   .to = work_.asked.as<float>()},
                  work_.stream),
       "ordering sums");
  for (int64_t end = k_; end > 0;) {
    const int64_t begin = (end - 1) / kFactorBlock * kFactorBlock;
    solve_block(begin, end - begin);
    end = begin;
  }
  // What is no number in D is none in Z.
  must(find_no_number(work_.asked.as<float>(), k_ * k_, work_.failed.as<int32_t>(), work_.stream),
       "looking at sums");
  int32_t found = 0;
  copy_out(std::span(&found, 1), work_.failed, work_.stream);
  return found == 0;
}

void CudaDrift::solve_block(int64_t begin, int64_t count) {
  const float* factor = work_.factored.r + begin;  // its columns from here on
  float* block = work_.asked.as<float>() + begin;
  auto* panel = work_.panel.as<float>();  // [k, kFactorBlock]
  must(invert_upper({factor + begin * k_, k_, count, work_.inverse.as<float>()}, work_.stream),
       "inverting a block");
  work_.multiply({.transpose_a = true,
                  .m = count,
                  .n = k_,
                  .k = count,
                  .lda = kFactorBlock,
                  .ldb = k_,
                  .ldc = kFactorBlock},
                 {.a = work_.inverse.as<float>(), .b = block, .c = panel});
  constexpr size_t kFloat = sizeof(float);
  must(cudaMemcpy2DAsync(block, static_cast<size_t>(k_) * kFloat, panel, kFactorBlock * kFloat,
                         static_cast<size_t>(count) * kFloat, static_cast<size_t>(k_),
                         cudaMemcpyDeviceToDevice, work_.stream),
       "copying a panel");
  if (begin > 0) {
    work_.multiply(
        {.transpose_a = true,
         .m = begin,
         .n = k_,
         .k = count,
         .lda = k_,
         .ldb = kFactorBlock,
         .ldc = k_},
        {.a = factor, .b = panel, .c = work_.asked.as<float>(), .alpha = -1.0F, .beta = 1.0F});
  }
}

Status CudaDrift::load(const LoadedWeights& weights, double* parts) {
  const int64_t bytes = weights.stride * k_ * 4;
  NIBBLE_RETURN_IF_ERROR(work_.room(work_.drift_products, bytes, "weights of a calibration"));
  work_.multiply({.m = k_, .n = weights.n, .k = k_, .lda = k_, .ldb = k_, .ldc = k_},
                 {.a = sums_.as<float>(), .b = weights.w, .c = work_.drift_products.as<float>()});
  must(turn_columns({.from = weights.w,
                     .order = work_.factored.device_order,
                     .rows = weights.n,
                     .k = k_,
                     .to = work_.turned.as<float>(),
                     .stride = weights.stride},
                    work_.stream),
       "turning a matrix");
  auto* products = work_.sums.as<float>();
  multiply_turned({work_.turned.as<float>(), work_.asked.as<float>(), 1.0F}, weights.stride,
                  products);
  must(dot_parts(products, products, k_ * weights.stride, parts, work_.stream), "an error");
  return {};
}

void CudaDrift::multiply_turned(const Turned& product, int64_t stride, float* to) const {
  work_.multiply(
      {.transpose_b = true, .m = stride, .n = k_, .k = k_, .lda = stride, .ldb = k_, .ldc = stride},
      {.a = product.weights, .b = product.by, .c = to, .alpha = product.share});
}

void CudaDrift::ask_columns(const float* turned, int64_t stride, float* to) const {
  multiply_turned({turned, work_.asked.as<float>(), share_}, stride, to);
}

void CudaDrift::ask_gradients(const float* turned, int64_t stride, float* to) const {
  multiply_turned({turned, sums_.as<float>(), share_}, stride, to);
}

}  // namespace nibble::cuda
