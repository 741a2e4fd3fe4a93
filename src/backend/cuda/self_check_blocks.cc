#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/self_check.h"
#include "backend/cuda/self_check_data.h"
#include "base/f16.h"
#include "quant/block_rounding.h"

namespace nibble::cuda {
namespace {

constexpr uint32_t kSeed = 31;
constexpr int64_t kRows = 3;
constexpr float kEps = 1e-5F;
// Numbers are computed before they are rounded, in F32 and where SiLU is short of bits, so that a
// code may be the next one.
constexpr double kScaleError = 1e-3;
constexpr double kUnitError = 1.2;

/// Rows of n as the kernels of activations get them and what they make of them.
struct Rows {
  std::vector<uint16_t> given;
  std::vector<float> wanted;
};

Rows silu_rows(int64_t n) {
  Rows rows{random_bf16(static_cast<size_t>(2 * kRows * n), kSeed), {}};
  for (int64_t i = 0; i < kRows * n; ++i) {
    const auto gate = static_cast<size_t>(i / n * 2 * n + i % n);
    rows.wanted.push_back(static_cast<float>(
        exact_activation(GemmInput::Kind::kSiluMul, bf16_to_f32(rows.given[gate]),
                         bf16_to_f32(rows.given[gate + static_cast<size_t>(n)]))));
  }
  return rows;
}

Rows plain_rows(int64_t n) {
  Rows rows{random_bf16(static_cast<size_t>(kRows * n), kSeed + 1), {}};
  for (const uint16_t value : rows.given) {
    rows.wanted.push_back(bf16_to_f32(value));
  }
  return rows;
}

/// The RMS norm of rows, with weights of 1.
std::vector<float> normed(std::vector<float> rows, int64_t n) {
  for (auto row = rows.begin(); row != rows.end(); row += n) {
    double squares = 0.0;
    for (auto x = row; x != row + n; ++x) {
      squares += static_cast<double>(*x) * *x;
    }
    const double size = std::sqrt(squares / static_cast<double>(n) + kEps);
    for (auto x = row; x != row + n; ++x) {
      *x = static_cast<float>(*x / size);
    }
  }
  return rows;
}

/// What kernels round, beside quant/block_rounding.h.
class BlockRows final {
 public:
  static Result<BlockRows> create(const ActSpec& act, const WeightFormat& weight, int64_t n) {
    BlockRows rows(act, n);
    NIBBLE_ASSIGN_OR_RETURN(rows.blocks_, DeviceBlocks::create(act, weight, n));
    NIBBLE_ASSIGN_OR_RETURN(rows.codes_, poisoned_device(static_cast<size_t>(kRows * n)));
    NIBBLE_ASSIGN_OR_RETURN(rows.scales_, poisoned_device(rows.scale_count() * sizeof(float)));
    return rows;
  }

  [[nodiscard]] QuantizedRows out() const {
    return {act_.format, codes_.as<void>(), scales_.as<float>(), blocks_->view()};
  }

  /// The stream has ended.
  [[nodiscard]] Status compare(std::string_view kernel, const std::vector<float>& wanted) const {
    std::vector<int8_t> codes(wanted.size());
    std::vector<float> scales(scale_count());
    NIBBLE_RETURN_IF_ERROR(copy_back(codes_, 0, std::span(codes)));
    NIBBLE_RETURN_IF_ERROR(copy_back(scales_, 0, std::span(scales)));
    const auto width = static_cast<size_t>(n_);
    const BlockPrecision& blocks = *act_.blocks;
    std::vector<int8_t> row(width);
    std::vector<float> ordered(width), steps(blocks.bits.size());
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < width; ++i) {
        const size_t from = act_.columns != nullptr ? static_cast<size_t>((*act_.columns)[i]) : i;
        ordered[i] = wanted[r * width + from];
      }
      const int shift = by_class() ? class_codes(blocks, ordered.data()).shift : 0;
      round_blocks(blocks, blocks_->view().scales, ordered.data(), {row.data(), steps.data()});
      for (size_t i = 0; i < width; ++i) {
        const size_t step = scale_of(i);
        const int code = codes[r * width + i];
        const float scale = scales[step * static_cast<size_t>(int_scale_stride(kRows)) + r];
        const double unit = std::max(scale, steps[step]) * (is_narrow(i) ? 1 << shift : 1);
        const double error = double{scale} * code - double{steps[step]} * row[i];
        if (!is_near(scale, steps[step]) || !(std::fabs(error) <= kUnitError * unit)) {
          return make_error(
              StatusCode::kUnavailable,
              "self-test: kernel {} is wrong on this GPU: of rows of {} in blocks of 4 and 8 bits, "
              "channel {} is {} times {:.6g} instead of {} times {:.6g}; serve with --device cpu, "
              "and report it",
              kernel, n_, i, code, scale, static_cast<int>(row[i]), steps[step]);
        }
      }
    }
    return {};
  }

 private:
  BlockRows(const ActSpec& act, int64_t n) : act_(act), n_(n) {}

  [[nodiscard]] size_t scale_count() const {
    return static_cast<size_t>(int_scale_rows(blocks_->view(), n_) * int_scale_stride(kRows));
  }
  [[nodiscard]] size_t scale_of(size_t channel) const {
    const size_t block = channel / static_cast<size_t>(act_.blocks->block);
    return by_class() ? 0 : block;
  }
  [[nodiscard]] bool by_class() const { return blocks_->view().scales == BlockScales::kClass; }
  /// Whether codes of a channel of 4 bits may count several scales.
  [[nodiscard]] bool is_narrow(size_t channel) const {
    return by_class() && act_.blocks->bits[channel / static_cast<size_t>(act_.blocks->block)] == 4;
  }
  /// A shared scale may be the next one, of half or twice the size.
  [[nodiscard]] bool is_near(float scale, float wanted) const {
    const auto near = [&](double size) {
      return std::fabs(scale - size * wanted) <= kScaleError * wanted;
    };
    return near(1) || (by_class() && (near(0.5) || near(2)));
  }

  ActSpec act_;
  int64_t n_;
  std::shared_ptr<const DeviceBlocks> blocks_;
  DeviceBuffer codes_, scales_;
};

}  // namespace

Status SelfCheck::check_block_rows(const ActSpec& act, const WeightFormat& weight, int64_t n) {
  if (!rows_.emplace(act.format, n).second) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const BlockRows rows, BlockRows::create(act, weight, n));
  const auto compare = [&](std::string_view kernel, cudaError_t error,
                           const std::vector<float>& wanted) -> Status {
    NIBBLE_RETURN_IF_ERROR(check(error, kernel));
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), kernel));
    ++checks_;
    return rows.compare(kernel, wanted);
  };
  const Rows plain = plain_rows(n), silu = silu_rows(n);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer given, device_copy(plain.given));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer floats, device_copy(plain.wanted));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer gate_up, device_copy(silu.given));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer ones,
                          device_copy(std::vector<float>(static_cast<size_t>(n), 1.0F)));
  NIBBLE_RETURN_IF_ERROR(compare(
      "quantize_rows",
      quantize_rows({.x = given.as<void>(), .rows = kRows, .n = n, .out = rows.out()}, {stream_}),
      plain.wanted));
  NIBBLE_RETURN_IF_ERROR(
      compare("norm_quantize",
              norm_quantize({.x = floats.as<float>(),
                             .norm = {GemmInput::Kind::kRmsNorm, ones.as<float>(), kEps},
                             .rows = kRows,
                             .n = n,
                             .out = rows.out()},
                            {stream_}),
              normed(plain.wanted, n)));
  return compare(
      "activation_quantize",
      activation_quantize({.x = gate_up.as<void>(), .rows = kRows, .n = n, .out = rows.out()},
                          {stream_}),
      silu.wanted);
}

}  // namespace nibble::cuda
