#include "backend/cuda/calibration/cuda_site.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/calibration/copies.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

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
  forget_factors();
  work_.loaded = work_.loaded == this ? nullptr : work_.loaded;
}

void CudaSite::forget_factors() {
  work_.alone.forget(this);
  work_.ahead.forget(this);
  if (work_.factored.site == this) {
    work_.factored = {};
  }
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
  CHECK(drift_ != nullptr && work_.factored.site == this);
  work_.factor_timer.start(work_.stream);
  NIBBLE_ASSIGN_OR_RETURN(drift_solved_, drift_->solve(share));
  work_.factor_timer.stop(work_.stream);
  return drift_solved_;
}

void CudaSite::add_rows(const SplitRows& rows, int64_t count) {
  forget_factors();
  work_.add_products(rows, count, k_, h());
  rows_ += count;
}

void CudaSite::add_sums(const SiteMath& other, double factor) {
  const auto& site = dynamic_cast<const CudaSite&>(other);
  CHECK_EQ(site.k_, k_);
  forget_factors();
  must(add_scaled(site.h(), factor, k_ * k_, h(), work_.stream), "adding sums");
  if (drift_ != nullptr && site.drift_ != nullptr) {
    drift_->add_sums(*site.drift_, factor);
  }
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
  const CudaFactors::Request request{this, h(), order, damping};
  work_.factored = {};
  drift_solved_ = false;
  const CudaFactors::Factor* factor = work_.ahead.find(request);
  if (factor == nullptr) {
    NIBBLE_RETURN_IF_ERROR(work_.alone.make(work_, k_, {&request, 1}));
    factor = work_.alone.find(request);
    CHECK(factor != nullptr);
  }
  if (factor->made) {
    work_.factored = *factor;
    damping_ = damping.damping;
  }
  return factor->made;
}

}  // namespace nibble::cuda
