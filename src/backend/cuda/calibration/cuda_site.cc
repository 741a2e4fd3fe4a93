#include "backend/cuda/calibration/cuda_site.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/calibration/copies.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kRestColumns = 2048;  // of what is left of a matrix, that are one product

ActFormat on_device(ActFormat act) { return act == ActFormat::kFloat ? ActFormat::kBf16 : act; }

}  // namespace

Result<std::unique_ptr<SiteMath>> CudaSite::create(CalibrationWork& work,
                                                   int64_t k,
                                                   ActFormat act) {
  CHECK(row_width_ok(k));
  std::unique_ptr<CudaSite> site(new CudaSite(work, k, on_device(act)));
  NIBBLE_ASSIGN_OR_RETURN(site->sums_,
                          allocate_zeroed(static_cast<size_t>(CalibrationMath::site_bytes(k)),
                                          "sums of products of a calibration"));
  return std::unique_ptr<SiteMath>(std::move(site));
}

CudaSite::~CudaSite() {
  work_.factored = work_.factored == this ? nullptr : work_.factored;
  work_.loaded = work_.loaded == this ? nullptr : work_.loaded;
}

void CudaSite::add(const Step& step, const InputRows& rows) {
  CHECK_EQ(rows.width, k_);
  work_.sums_timer.start(work_.stream);
  add_rows(prepare(step, rows), step.rows());
  work_.sums_timer.stop(work_.stream);
}

SplitRows CudaSite::prepare(const Step& step, const InputRows& rows) const {
  return work_.prepare({.x = rows.x,
                        .input = rows.input,
                        .stride = rows.stride,
                        .rows = step.rows(),
                        .k = k_,
                        .out = {.format = act_}});
}

Status CudaSite::expect_drift() {
  NIBBLE_ASSIGN_OR_RETURN(drift_, CudaDrift::create(work_, k_));
  return {};
}

void CudaSite::add_drift(const Step& step, const InputRows& rows, const void* wanted) {
  work_.sums_timer.start(work_.stream);
  const SplitRows split = prepare(step, rows);
  const void* unrounded = work_.prepare_wanted({.x = {wanted, rows.x.type},
                                                .input = rows.input,
                                                .stride = rows.stride,
                                                .rows = step.rows(),
                                                .k = k_});
  add_drift_rows(split, unrounded, step.rows());
  work_.sums_timer.stop(work_.stream);
}

void CudaSite::add_drift_rows(const SplitRows& rows, const void* wanted, int64_t count) {
  CHECK(drift_ != nullptr);
  drift_->add(rows, wanted, count);
}

Result<bool> CudaSite::solve_drift(float share) {
  CHECK(drift_ != nullptr && work_.factored == this);
  work_.factor_timer.start(work_.stream);
  NIBBLE_ASSIGN_OR_RETURN(drift_solved_, drift_->solve(share));
  work_.factor_timer.stop(work_.stream);
  return drift_solved_;
}

void CudaSite::add_rows(const SplitRows& rows, int64_t count) {
  work_.add_products(rows, count, k_, h());
  rows_ += count;
}

void CudaSite::add_sums(const SiteMath& other, double factor) {
  const auto& site = dynamic_cast<const CudaSite&>(other);
  CHECK_EQ(site.k_, k_);
  must(add_scaled(site.h(), factor, k_ * k_, h(), work_.stream), "adding sums");
}

std::vector<float> CudaSite::finish() {
  work_.sums_timer.start(work_.stream);
  must(complete_symmetric(h(), k_, work_.stream), "completing sums");
  must(work_.room(work_.diagonal, k_ * 4, "a diagonal"));
  must(take_diagonal(h(), k_, work_.diagonal.as<float>(), work_.stream), "a diagonal");
  work_.sums_timer.stop(work_.stream);
  std::vector<float> diagonal(static_cast<size_t>(k_));
  copy_out(std::span(diagonal), work_.diagonal, work_.stream);
  return diagonal;
}

Result<bool> CudaSite::factor(std::span<const int32_t> order, const DiagonalDamping& damping) {
  CHECK_EQ(std::ssize(order), k_);
  work_.factored = nullptr;
  NIBBLE_RETURN_IF_ERROR(work_.room(work_.factor, k_ * k_ * 4, "the factor of a calibration"));
  NIBBLE_RETURN_IF_ERROR(work_.room(work_.panel, k_ * kFactorBlock * 4, "a factor's panel"));
  NIBBLE_RETURN_IF_ERROR(work_.room(work_.order, k_ * 4, "an order of columns"));
  work_.factor_timer.start(work_.stream);
  copy_in(work_.order, order, work_.stream);
  must(cudaMemsetAsync(work_.failed.as<void>(), 0, sizeof(int32_t), work_.stream), "a flag");
  must(reverse_sums({.from = h(),
                     .order = work_.order.as<int32_t>(),
                     .k = k_,
                     .damping = damping.damping,
                     .floor = damping.floor,
                     .to = work_.factor.as<float>()},
                    work_.stream),
       "ordering sums");
  factor_blocks();
  must(reverse_in_place(work_.factor.as<float>(), k_ * k_, work_.stream), "turning a factor");
  work_.factor_timer.stop(work_.stream);
  int32_t failed = 0;
  copy_out(std::span(&failed, 1), work_.failed, work_.stream);
  work_.factored = failed == 0 ? this : nullptr;
  damping_ = damping.damping;
  drift_solved_ = false;
  return failed == 0;
}

// A = L L^T, block column by block column: the block at the diagonal, what is below it by the
// block's inverse, then what those take off the rest (right-looking).
void CudaSite::factor_blocks() {
  for (int64_t p = 0; p < k_; p += kFactorBlock) {
    const int64_t count = std::min(kFactorBlock, k_ - p);
    must(factor_block({.a = work_.factor.as<float>() + p * k_ + p,
                       .stride = k_,
                       .count = count,
                       .inverse = work_.inverse.as<float>(),
                       .failed = work_.failed.as<int32_t>()},
                      work_.stream),
         "factoring a block");
    if (p + count < k_) {
      factor_rest(p, count);
    }
  }
}

void CudaSite::factor_rest(int64_t begin, int64_t count) {
  const int64_t from = begin + count;
  const int64_t rest = k_ - from;
  float* below = work_.factor.as<float>() + from * k_ + begin;
  auto* panel = work_.panel.as<float>();  // [rest, kFactorBlock]
  work_.multiply({.transpose_a = true,
                  .m = count,
                  .n = rest,
                  .k = count,
                  .lda = kFactorBlock,
                  .ldb = k_,
                  .ldc = kFactorBlock},
                 {.a = work_.inverse.as<float>(), .b = below, .c = panel});
  constexpr size_t kFloat = sizeof(float);
  must(cudaMemcpy2DAsync(below, static_cast<size_t>(k_) * kFloat, panel, kFactorBlock * kFloat,
                         static_cast<size_t>(count) * kFloat, static_cast<size_t>(rest),
                         cudaMemcpyDeviceToDevice, work_.stream),
       "copying a panel");
  float* left = work_.factor.as<float>() + from * k_ + from;
  for (int64_t c = 0; c < rest; c += kRestColumns) {
    const int64_t end = std::min(rest, c + kRestColumns);
    work_.multiply({.transpose_a = true,
                    .m = end,
                    .n = end - c,
                    .k = count,
                    .lda = kFactorBlock,
                    .ldb = kFactorBlock,
                    .ldc = k_},
                   {.a = panel,
                    .b = panel + c * kFactorBlock,
                    .c = left + c * k_,
                    .alpha = -1.0F,
                    .beta = 1.0F});
  }
}

}  // namespace nibble::cuda
