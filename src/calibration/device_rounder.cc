#include "calibration/device_rounder.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "base/math.h"
#include "quantizer/algorithms/imatrix.h"
#include "quantizer/algorithms/refine.h"
#include "quantizer/algorithms/rtn.h"

namespace nibble {
namespace {

constexpr size_t kCopied = size_t{1} << 20;  // numbers that a thread copies at a time

}  // namespace

void DeviceRounding::note_seconds() {
  const DeviceSeconds seconds = math_.take_seconds();
  times_.add(CalibrationPart::kForward, seconds.forward);
  times_.add(CalibrationPart::kSums, seconds.sums);
  times_.add(CalibrationPart::kFactor, seconds.factor);
  times_.add(CalibrationPart::kRounding, seconds.rounding);
}

Result<std::span<float>> DeviceRounding::room(DeviceBuffer& buffer, size_t count) {
  if (buffer.size() < count * sizeof(float)) {
    buffer = DeviceBuffer();
    NIBBLE_ASSIGN_OR_RETURN(buffer, math_.allocate_pinned(count * sizeof(float)));
  }
  return std::span(buffer.as<float>(), count);
}

Result<std::unique_ptr<MatrixRounder>> DeviceRounder::create(SiteMath& site,
                                                             Rounding rounding,
                                                             DeviceRounding& parts) {
  std::unique_ptr<DeviceRounder> rounder(new DeviceRounder(site, rounding, parts));
  NIBBLE_RETURN_IF_ERROR(rounder->prepare());
  return std::unique_ptr<MatrixRounder>(std::move(rounder));
}

Status DeviceRounder::prepare() {
  const std::vector<float> diagonal = site_.finish();
  // |H_ij|^2 <= H_ii H_jj: what is no number elsewhere shows on the diagonal.
  if (!std::ranges::all_of(diagonal, [](float sum) { return std::isfinite(sum); })) {
    return {};
  }
  importance_ = column_importance(diagonal);
  if (!by_columns(rounding_)) {
    return {};
  }
  const std::vector<int32_t> order = column_order(diagonal);
  for (const Damping& damping : damping_steps(diagonal)) {
    NIBBLE_ASSIGN_OR_RETURN(
        const bool made, site_.factor(order, {.damping = damping.added, .floor = damping.floor}));
    if (made) {
      return take_drift();
    }
  }
  rounding_ = Rounding::kImatrix;  // which needs no factor
  return {};
}

Status DeviceRounder::take_drift() {
  if (rounding_ == Rounding::kGptaq) {
    NIBBLE_ASSIGN_OR_RETURN(const bool numbers, site_.solve_drift(kDriftShare));
    rounding_ = numbers ? Rounding::kGptaq : Rounding::kGptq;
  }
  return {};
}

void DeviceRounder::attempt(const MatrixToRound& matrix, Rounding rounding, RoundedMatrix& out) {
  out.rounding = rounding;
  parts_.times().time(CalibrationPart::kScales, [&] {
    choose_all_scales(matrix, rounding == Rounding::kRtn ? nullptr : importance_.data(), out,
                      parts_.pool());
  });
  begin(matrix, out);
}

void DeviceRounder::begin(const MatrixToRound& matrix, const RoundedMatrix& scales) {
  site_.round(by_columns(scales.rounding) ? RoundingWay::kRefined : RoundingWay::kNearest,
              {.format = matrix.format,
               .scales = scales.scales.data(),
               .zeros = scales.zeros.empty() ? nullptr : scales.zeros.data(),
               .fits = fits_scales(matrix)});
}

// While the device computes errors, threads choose the next scales; while it computes the last,
// they do what they are given.
Status DeviceRounder::round(const MatrixToRound& matrix,
                            RoundedMatrix& out,
                            const Meanwhile& meanwhile) {
  if (!has_sums()) {
    out = RoundedMatrix();
    round_to_nearest(matrix, nullptr, out, parts_.pool());
    return {};
  }
  const auto count = static_cast<size_t>(matrix.n * matrix.k);
  NIBBLE_RETURN_IF_ERROR(site_.load({matrix.w, count}));
  site_.round(RoundingWay::kZero, {});
  attempt(matrix, Rounding::kRtn, out);
  std::vector<double> errors;
  if (rounding_ == Rounding::kImatrix) {
    errors = site_.take_errors();  // it rounds to the nearest, too
  }
  if (rounding_ != Rounding::kRtn) {
    attempt(matrix, rounding_, other_);
  }
  if (meanwhile) {
    meanwhile();
  }
  std::ranges::copy(site_.take_errors(), std::back_inserter(errors));
  const double whole = errors.at(0);
  const double rtn_error = errors.at(1);
  out.error = rtn_error;
  if (errors.size() > 2 && std::isfinite(errors[2]) && errors[2] <= rtn_error) {
    std::swap(out.scales, other_.scales);
    std::swap(out.zeros, other_.zeros);
    out.rounding = rounding_;
    out.error = errors[2];
    if (by_columns(rounding_)) {
      site_.read_scales(out.scales);
    }
  } else if (errors.size() > 2) {
    begin(matrix, out);
    site_.take_errors();
  }
  out.error = whole > 0 ? out.error / whole : 0;
  out.rtn_error = whole > 0 ? rtn_error / whole : 0;
  out.outputs = whole;
  Status read = read_values(out, count);
  parts_.note_seconds();
  return read;
}

Status DeviceRounder::read_values(RoundedMatrix& out, size_t count) {
  NIBBLE_ASSIGN_OR_RETURN(const std::span<float> values, parts_.values(count));
  site_.read_values(values);
  out.values.resize(count);
  parts_.pool().parallel_for(
      ceil_div(static_cast<int64_t>(count), static_cast<int64_t>(kCopied)), [&](int64_t i, int) {
        const size_t begin = static_cast<size_t>(i) * kCopied;
        std::copy_n(values.begin() + static_cast<int64_t>(begin), std::min(kCopied, count - begin),
                    out.values.begin() + static_cast<int64_t>(begin));
      });
  return {};
}

}  // namespace nibble
