#include "backend/cuda/calibration/cuda_factors.h"

#include <algorithm>

#include "backend/cuda/calibration/calibration_work.h"
#include "backend/cuda/calibration/copies.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kRestColumns = 2048;  // of what is left of a matrix, that are one product

}  // namespace

Status CudaFactors::make(CalibrationWork& work, int64_t k, std::span<const Request> requests) {
  made_.clear();
  k_ = k;
  count_ = std::ssize(requests);
  NIBBLE_RETURN_IF_ERROR(work.room(factors_, count_ * k * k * 4, "factors of a calibration"));
  NIBBLE_RETURN_IF_ERROR(work.room(panels_, count_ * k * kFactorBlock * 4, "a factor's panel"));
  NIBBLE_RETURN_IF_ERROR(
      work.room(inverses_, count_ * kFactorBlock * kFactorBlock * 4, "a factor's block"));
  NIBBLE_RETURN_IF_ERROR(work.room(orders_, count_ * k * 4, "an order of columns"));
  NIBBLE_RETURN_IF_ERROR(work.room(failed_, count_ * 4, "flags"));
  work.factor_timer.start(work.stream);
  begin(work, requests);
  factor_blocks(work);
  for (int64_t i = 0; i < count_; ++i) {
    must(reverse_in_place(factor(i), k * k, work.stream), "turning a factor");
  }
  work.factor_timer.stop(work.stream);
  std::vector<int32_t> failed(requests.size());
  copy_out(std::span(failed), failed_, work.stream);
  for (int64_t i = 0; i < count_; ++i) {
    const Request& request = requests[static_cast<size_t>(i)];
    made_.push_back({.site = request.site,
                     .order = {request.order.begin(), request.order.end()},
                     .damping = request.damping,
                     .made = failed[static_cast<size_t>(i)] == 0,
                     .r = factor(i),
                     .device_order = orders_.as<int32_t>() + i * k});
  }
  return {};
}

const CudaFactors::Factor* CudaFactors::find(const Request& request) const {
  const auto found = std::ranges::find_if(made_, [&](const Factor& factor) {
    return factor.site == request.site && factor.damping == request.damping &&
           std::ranges::equal(factor.order, request.order);
  });
  return found == made_.end() ? nullptr : &*found;
}

void CudaFactors::forget(const void* site) {
  std::erase_if(made_, [&](const Factor& factor) { return factor.site == site; });
}

void CudaFactors::begin(CalibrationWork& work, std::span<const Request> requests) {
  must(cudaMemsetAsync(failed_.as<void>(), 0, requests.size() * sizeof(int32_t), work.stream),
       "flags");
  for (int64_t i = 0; i < count_; ++i) {
    const Request& request = requests[static_cast<size_t>(i)];
    CHECK_EQ(std::ssize(request.order), k_);
    int32_t* order = orders_.as<int32_t>() + i * k_;
    must(cudaMemcpyAsync(order, request.order.data(), request.order.size_bytes(),
                         cudaMemcpyHostToDevice, work.stream),
         "copying to the GPU");
    must(reverse_sums({.from = request.h,
                       .order = order,
                       .k = k_,
                       .damping = request.damping.damping,
                       .floor = request.damping.floor,
                       .to = factor(i)},
                      work.stream),
         "ordering sums");
  }
}

// A = L L^T, block column by block column: the block at the diagonal, what is below it by the
// block's inverse, then what those take off the rest (right-looking).
void CudaFactors::factor_blocks(CalibrationWork& work) {
  for (int64_t p = 0; p < k_; p += kFactorBlock) {
    const int64_t count = std::min(kFactorBlock, k_ - p);
    must(factor_block({.a = factor(0) + p * k_ + p,
                       .stride = k_,
                       .count = count,
                       .inverse = inverses_.as<float>(),
                       .failed = failed_.as<int32_t>(),
                       .batch = count_,
                       .batch_stride = k_ * k_},
                      work.stream),
         "factoring a block");
    if (p + count < k_) {
      factor_rest(work, p, count);
    }
  }
}

void CudaFactors::factor_rest(CalibrationWork& work, int64_t begin, int64_t count) {
  const int64_t from = begin + count;
  const int64_t rest = k_ - from;
  const int64_t square = k_ * k_;
  const int64_t panel_size = k_ * kFactorBlock;
  float* below = factor(0) + from * k_ + begin;
  auto* panel = panels_.as<float>();  // [rest, kFactorBlock]
  work.multiply({.transpose_a = true,
                 .m = count,
                 .n = rest,
                 .k = count,
                 .lda = kFactorBlock,
                 .ldb = k_,
                 .ldc = kFactorBlock,
                 .batch = {count_, kFactorBlock * kFactorBlock, square, panel_size}},
                {.a = inverses_.as<float>(), .b = below, .c = panel});
  constexpr size_t kFloat = sizeof(float);
  for (int64_t i = 0; i < count_; ++i) {
    must(cudaMemcpy2DAsync(below + i * square, static_cast<size_t>(k_) * kFloat,
                           panel + i * panel_size, kFactorBlock * kFloat,
                           static_cast<size_t>(count) * kFloat, static_cast<size_t>(rest),
                           cudaMemcpyDeviceToDevice, work.stream),
         "copying a panel");
  }
  float* left = factor(0) + from * k_ + from;
  for (int64_t c = 0; c < rest; c += kRestColumns) {
    const int64_t end = std::min(rest, c + kRestColumns);
    work.multiply({.transpose_a = true,
                   .m = end,
                   .n = end - c,
                   .k = count,
                   .lda = kFactorBlock,
                   .ldb = kFactorBlock,
                   .ldc = k_,
                   .batch = {count_, panel_size, panel_size, square}},
                  {.a = panel,
                   .b = panel + c * kFactorBlock,
                   .c = left + c * k_,
                   .alpha = -1.0F,
                   .beta = 1.0F});
  }
}

}  // namespace nibble::cuda
