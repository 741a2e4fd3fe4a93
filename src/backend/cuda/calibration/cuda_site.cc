#include "backend/cuda/calibration/cuda_site.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backend/cuda/calibration/cuda_refiner.h"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kRestColumns = 2048;  // of what is left of a matrix, that are one product
constexpr int64_t kPaddedRows = 64;     // as round_column_block() takes them

template <typename T>
void copy_in(DeviceBuffer& to, std::span<const T> from, cudaStream_t stream) {
  must(cudaMemcpyAsync(to.as<void>(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice,
                       stream),
       "copying to the GPU");
}

template <typename T>
void copy_out(std::span<T> to, const DeviceBuffer& from, cudaStream_t stream) {
  must(cudaMemcpyAsync(to.data(), from.as<void>(), to.size_bytes(), cudaMemcpyDeviceToHost, stream),
       "copying from the GPU");
  must(cudaStreamSynchronize(stream), "a calibration");
}

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
  const SplitRows split = work_.prepare({.x = rows.x,
                                         .input = rows.input,
                                         .stride = rows.stride,
                                         .rows = step.rows(),
                                         .k = k_,
                                         .out = {.format = act_}});
  add_rows(split, step.rows());
  work_.sums_timer.stop(work_.stream);
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
  return {};
}

void CudaSite::square(const float* e) {
  CHECK_LT(squared_, static_cast<int64_t>(kRoundingWays));
  auto* product = work_.sums.as<float>();
  work_.multiply({.m = k_, .n = n_, .k = k_, .lda = k_, .ldb = k_, .ldc = k_},
                 {.a = h(), .b = e, .c = product});
  must(
      dot_parts(e, product, n_ * k_, work_.parts.as<double>() + squared_ * kDotParts, work_.stream),
      "an error");
  ++squared_;
}

std::vector<double> CudaSite::take_errors() {
  std::vector<double> parts(static_cast<size_t>(squared_ * kDotParts));
  copy_out(std::span(parts), work_.parts, work_.stream);
  std::vector<double> errors;
  for (auto at = parts.begin(); at != parts.end(); at += kDotParts) {
    errors.push_back(std::accumulate(at, at + kDotParts, 0.0));
  }
  squared_ = 0;
  return errors;
}

void CudaSite::round(RoundingWay way, const MatrixScales& scales) {
  CHECK(work_.loaded == this);
  work_.rounding_timer.start(work_.stream);
  if (way == RoundingWay::kZero) {
    square(work_.weights.as<float>());
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
                        .fits_scales = scales.fits})
        .run();
  }
  must(subtract(work_.weights.as<float>(), work_.values.as<float>(), n_ * k_,
                work_.turned.as<float>(), work_.stream),
       "errors");
  square(work_.turned.as<float>());
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
  args.order = work_.order.as<int32_t>();
  args.k = k_;
  args.to = work_.turned.as<float>();
  must(turn_columns(args, work_.stream), "turning a matrix");
}

void CudaSite::round_columns(const MatrixScales& scales, int64_t groups) {
  CHECK(work_.factored == this);
  turn_in(scales, groups);
  const bool zeros = scales.zeros != nullptr;
  const auto* order = work_.order.as<int32_t>();
  must(cudaMemsetAsync(work_.sums.as<void>(), 0, static_cast<size_t>(k_ * stride_) * sizeof(float),
                       work_.stream),
       "sums of columns");
  for (int64_t begin = 0; begin < k_; begin += kColumnBlock) {
    const int64_t count = std::min(kColumnBlock, k_ - begin);
    const float* lines = work_.factor.as<float>() + begin * k_;
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
