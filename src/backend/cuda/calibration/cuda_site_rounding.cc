// A site's matrices: loaded, rounded, judged.

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/cuda/calibration/copies.h"
#include "backend/cuda/calibration/cuda_refiner.h"
#include "backend/cuda/calibration/cuda_site.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kPaddedRows = 64;  // as round_column_block() takes them

}  // namespace

Status CudaSite::load(std::span<const float> weights) {
  CHECK_EQ(std::ssize(weights) % k_, 0);
  work_.loaded = nullptr;
  n_ = std::ssize(weights) / k_;
  stride_ = round_up(n_, kPaddedRows);
  const int64_t bytes = stride_ * k_ * 4;
  for (DeviceBuffer* buffer : {&work_.weights, &work_.values, &work_.turned, &work_.sums}) {
    NIBBLE_RETURN_IF_ERROR(work_.room(*buffer, bytes, "weights of a calibration"));
  }
  NIBBLE_RETURN_IF_ERROR(work_.room(work_.errors, kColumnBlock * stride_ * 4, "errors of columns"));
  work_.rounding_timer.start(work_.stream);
  copy_in(work_.weights, weights, work_.stream);
  work_.rounding_timer.stop(work_.stream);
  work_.loaded = this;
  squared_ = 0;
  if (!drift_solved_) {
    return {};
  }
  work_.rounding_timer.start(work_.stream);
  const Status loaded =
      drift_->load({work_.weights.as<float>(), n_, stride_}, parts(2 * kRoundingWays));
  work_.rounding_timer.stop(work_.stream);
  return loaded;
}

void CudaSite::square(const float* e, Of of) {
  CHECK_LT(squared_, kRoundingWays);
  auto* product = work_.sums.as<float>();
  work_.multiply({.m = k_, .n = n_, .k = k_, .lda = k_, .ldb = k_, .ldc = k_},
                 {.a = h(), .b = e, .c = product});
  must(dot_parts(e, product, n_ * k_, parts(squared_), work_.stream), "an error");
  if (of == Of::kErrors && drift_solved_) {
    must(dot_parts(e, drift_->products(), n_ * k_, parts(kRoundingWays + squared_), work_.stream),
         "an error");
  }
  of_.at(squared_) = of;
  ++squared_;
}

std::vector<double> CudaSite::take_errors() {
  std::vector<double> all(static_cast<size_t>(kSumsOfErrors * kDotParts));
  copy_out(std::span(all), work_.parts, work_.stream);
  const auto sum_of = [&](size_t sum) {
    const auto from = all.begin() + static_cast<int64_t>(sum) * kDotParts;
    return std::accumulate(from, from + kDotParts, 0.0);
  };
  std::vector<double> errors;
  for (size_t i = 0; i < squared_; ++i) {
    const bool drifted = of_.at(i) == Of::kErrors && drift_solved_;
    errors.push_back(sum_of(i) + (drifted ? 2 * sum_of(kRoundingWays + i) : 0.0) +
                     (drifted ? sum_of(2 * kRoundingWays) : 0.0));
  }
  squared_ = 0;
  return errors;
}

void CudaSite::round(RoundingWay way, const MatrixScales& scales) {
  CHECK(work_.loaded == this);
  work_.rounding_timer.start(work_.stream);
  if (way == RoundingWay::kZero) {
    square(work_.weights.as<float>(), Of::kOutputs);
    work_.rounding_timer.stop(work_.stream);
    return;
  }
  upload_scales(way, scales);
  const int64_t groups = scales.format.groups(k_);
  groups_ = groups;
  if (way == RoundingWay::kNearest) {
    round_nearest(scales, groups);
  } else {
    round_columns(scales, groups);
  }
  if (way == RoundingWay::kRefined) {
    CudaRefiner(work_, {.h = h(),
                        .n = n_,
                        .k = k_,
                        .stride = stride_,
                        .groups = groups,
                        .format = scales.format,
                        .damping = static_cast<float>(damping_),
                        .has_zeros = scales.zeros != nullptr,
                        .fits_scales = scales.fits,
                        .drift = drift_solved_ ? drift_.get() : nullptr})
        .run();
  }
  must(subtract(work_.weights.as<float>(), work_.values.as<float>(), n_ * k_,
                work_.turned.as<float>(), work_.stream),
       "errors");
  square(work_.turned.as<float>(), Of::kErrors);
  work_.rounding_timer.stop(work_.stream);
}

void CudaSite::upload_scales(RoundingWay way, const MatrixScales& scales) {
  const int64_t count = n_ * scales.format.groups(k_);
  must(work_.room(work_.scales, 2 * count * 4, "scales"));
  DeviceBuffer& sent = work_.sent_scales.at(static_cast<size_t>(way));
  const auto bytes = static_cast<size_t>(2 * count) * sizeof(float);
  if (sent.size() < bytes) {
    auto memory = allocate_pinned(bytes);
    must(memory.status());
    sent = std::move(memory).value();
  }
  auto* host = sent.as<float>();
  std::copy_n(scales.scales, count, host);
  if (scales.zeros != nullptr) {
    std::copy_n(scales.zeros, count, host + count);
  }
  copy_in(work_.scales, std::span<const float>(host, static_cast<size_t>(2 * count)), work_.stream);
}

void CudaSite::round_nearest(const MatrixScales& scales, int64_t groups) {
  const auto* on_gpu = work_.scales.as<float>();
  must(nearest_values({.form = value_form(scales.format),
                       .w = work_.weights.as<float>(),
                       .scales = on_gpu,
                       .zeros = scales.zeros == nullptr ? nullptr : on_gpu + n_ * groups,
                       .rows = n_,
                       .k = k_,
                       .groups = groups,
                       .values = work_.values.as<float>()},
                      work_.stream),
       "rounding");
}

// Weights, scales and zero points, column by column in the factor's order.
void CudaSite::turn_in(const MatrixScales& scales, int64_t groups) {
  const bool zeros = scales.zeros != nullptr;
  must(work_.room(work_.turned_scales, groups * stride_ * 4, "scales"));
  must(work_.room(work_.turned_zeros, zeros ? groups * stride_ * 4 : 0, "zero points"));
  const auto* on_gpu = work_.scales.as<float>();
  TurnArgs args{.from = on_gpu,
                .rows = n_,
                .k = groups,
                .to = work_.turned_scales.as<float>(),
                .stride = stride_,
                .rest = 1.0F};
  must(turn_columns(args, work_.stream), "turning scales");
  args.rest = 0.0F;
  if (zeros) {
    args.from = on_gpu + n_ * groups;
    args.to = work_.turned_zeros.as<float>();
    must(turn_columns(args, work_.stream), "turning zero points");
  }
  args.from = work_.weights.as<float>();
  args.order = work_.factored.device_order;
  args.k = k_;
  args.to = work_.turned.as<float>();
  must(turn_columns(args, work_.stream), "turning a matrix");
}

void CudaSite::round_columns(const MatrixScales& scales, int64_t groups) {
  CHECK(work_.factored.site == this);
  turn_in(scales, groups);
  const bool zeros = scales.zeros != nullptr;
  const auto* order = work_.factored.device_order;
  if (drift_solved_) {
    drift_->ask_columns(work_.turned.as<float>(), stride_, work_.sums.as<float>());
  } else {
    must(cudaMemsetAsync(work_.sums.as<void>(), 0,
                         static_cast<size_t>(k_ * stride_) * sizeof(float), work_.stream),
         "sums of columns");
  }
  for (int64_t begin = 0; begin < k_; begin += kColumnBlock) {
    const int64_t count = std::min(kColumnBlock, k_ - begin);
    const float* lines = work_.factored.r + begin * k_;
    must(round_column_block({.form = value_form(scales.format),
                             .w = work_.turned.as<float>() + begin * stride_,
                             .sums = work_.sums.as<float>() + begin * stride_,
                             .errors = work_.errors.as<float>(),
                             .factor = lines + begin,
                             .factor_stride = k_,
                             .order = order + begin,
                             .count = count,
                             .width = k_ / groups,
                             .scales = work_.turned_scales.as<float>(),
                             .zeros = zeros ? work_.turned_zeros.as<float>() : nullptr,
                             .stride = stride_},
                            work_.stream),
         "rounding columns");
    const int64_t rest = begin + count;
    if (rest < k_) {
      work_.multiply({.transpose_b = true,
                      .m = stride_,
                      .n = k_ - rest,
                      .k = count,
                      .lda = stride_,
                      .ldb = k_,
                      .ldc = stride_},
                     {.a = work_.errors.as<float>(),
                      .b = lines + rest,
                      .c = work_.sums.as<float>() + rest * stride_,
                      .beta = 1.0F});
    }
  }
  must(turn_back_columns({.from = work_.turned.as<float>(),
                          .order = order,
                          .rows = n_,
                          .k = k_,
                          .to = work_.values.as<float>(),
                          .stride = stride_},
                         work_.stream),
       "turning a matrix");
}

void CudaSite::read_scales(std::span<float> out) {
  CHECK(work_.loaded == this);
  CHECK_EQ(std::ssize(out), n_ * groups_);
  copy_out(out, work_.scales, work_.stream);
}

void CudaSite::read_values(std::span<float> out) {
  CHECK(work_.loaded == this);
  CHECK_EQ(std::ssize(out), n_ * k_);
  copy_out(out, work_.values, work_.stream);
}

}  // namespace nibble::cuda
