#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
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
constexpr float kSmallest = 4e-6F;      // error of a number near 0
constexpr float kNearBf16 = 0x1.4p-8F;  // half a last place, and 2^-11 of silu cut at 12 bits

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
    NIBBLE_ASSIGN_OR_RETURN(rows.codes_, poisoned_device(rows.row_bytes() * kRows));
    NIBBLE_ASSIGN_OR_RETURN(rows.scales_, poisoned_device(rows.scale_count() * sizeof(float)));
    return rows;
  }

  [[nodiscard]] QuantizedRows out() const {
    return {act_.format, codes_.as<void>(), scales_.as<float>(), blocks_->view()};
  }

  /// The stream has ended.
  [[nodiscard]] Status compare(std::string_view kernel, const std::vector<float>& wanted) const {
    std::vector<std::byte> values(row_bytes() * kRows);
    std::vector<float> scales(scale_count());
    NIBBLE_RETURN_IF_ERROR(copy_back(codes_, 0, std::span(values)));
    NIBBLE_RETURN_IF_ERROR(copy_back(scales_, 0, std::span(scales)));
    const auto width = static_cast<size_t>(n_);
    std::vector<float> ordered(width);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < width; ++i) {
        const size_t from = act_.columns != nullptr ? static_cast<size_t>((*act_.columns)[i]) : i;
        ordered[i] = wanted[r * width + from];
      }
      const std::byte* row = values.data() + r * row_bytes();
      NIBBLE_RETURN_IF_ERROR(is_wide() ? compare_wide_row(kernel, ordered, row, scales[r])
                                       : compare_row(kernel, ordered, row, scales.data() + r));
    }
    return {};
  }

 private:
  BlockRows(const ActSpec& act, int64_t n) : act_(act), n_(n) {}

  struct Code {
    int code = 0;
    float scale = 0.0F;
  };

  [[nodiscard]] bool is_wide() const { return blocks_->view().scales == BlockScales::kWide; }
  [[nodiscard]] size_t row_bytes() const {
    return static_cast<size_t>(is_wide() ? blocks_->view().wide.row_bytes() : n_);
  }

  [[nodiscard]] Status compare_row(std::string_view kernel,
                                   const std::vector<float>& wanted,
                                   const std::byte* codes,
                                   const float* scales) const {
    std::vector<int8_t> row(wanted.size());
    std::vector<float> steps(act_.blocks->bits.size() + 2);
    round_blocks(*act_.blocks, blocks_->view().scales, wanted.data(), {row.data(), steps.data()});
    const int shift = by_class() ? class_codes(*act_.blocks, wanted.data()).shift : 0;
    for (size_t i = 0; i < row.size(); ++i) {
      const size_t step = scale_of(i);
      const Code got{static_cast<int8_t>(codes[i]),
                     scales[step * static_cast<size_t>(int_scale_stride(kRows))]};
      const double unit = std::max(got.scale, steps[step]) * (is_narrow(i) ? 1 << shift : 1);
      const double error = double{got.scale} * got.code - double{steps[step]} * row[i];
      if (!is_near(got.scale, steps[step]) || !(std::fabs(error) <= kUnitError * unit)) {
        return wrong_code(kernel, i, got, {row[i], steps[step]});
      }
    }
    return {};
  }

  /// Blocks in INT8 and in BF16.
  [[nodiscard]] Status compare_wide_row(std::string_view kernel,
                                        const std::vector<float>& wanted,
                                        const std::byte* values,
                                        float scale) const {
    const BlockPrecision& blocks = *act_.blocks;
    const std::vector<int32_t> places = wide_order(blocks).places;
    std::vector<int16_t> row(wanted.size());
    std::vector<float> steps(blocks.bits.size() + 1);
    round_wide_blocks(blocks, wanted.data(), {row.data(), steps.data()});
    for (size_t i = 0; i < row.size(); ++i) {
      const size_t block = i / static_cast<size_t>(blocks.block);
      const size_t within = i % static_cast<size_t>(blocks.block);
      const std::byte* first = values + places[block];
      if (blocks.bits[block] == 8) {
        NIBBLE_RETURN_IF_ERROR(compare_code(kernel, i, {static_cast<int8_t>(first[within]), scale},
                                            {row[i], steps[0]}));
        continue;
      }
      uint16_t bits = 0;
      std::memcpy(&bits, first + 2 * within, sizeof(bits));
      const float got = bf16_to_f32(bits);
      if (!(std::fabs(got - wanted[i]) <= std::fabs(wanted[i]) * kNearBf16 + kSmallest)) {
        return make_error(
            StatusCode::kUnavailable,
            "self-test: kernel {} is wrong on this GPU: of rows of {} in blocks of 8 bits and of "
            "BF16, channel {} is {:.6g} instead of {:.6g}; serve with --device cpu, and report it",
            kernel, n_, i, got, wanted[i]);
      }
    }
    return {};
  }

  [[nodiscard]] Status compare_code(std::string_view kernel,
                                    size_t channel,
                                    const Code& got,
                                    const Code& want) const {
    if (std::abs(got.code - want.code) <= 1 &&
        std::fabs(got.scale - want.scale) <= kScaleError * want.scale) {
      return {};
    }
    return wrong_code(kernel, channel, got, want);
  }
  [[nodiscard]] Status wrong_code(std::string_view kernel,
                                  size_t channel,
                                  const Code& got,
                                  const Code& want) const {
    return make_error(StatusCode::kUnavailable,
                      "self-test: kernel {} is wrong on this GPU: of rows of {} in blocks of {}, "
                      "channel {} is {} times {:.6g} instead of {} times {:.6g}; serve with "
                      "--device cpu, and report it",
                      kernel, n_, is_wide() ? "8 bits and of BF16" : "4 and 8 bits", channel,
                      got.code, got.scale, want.code, want.scale);
  }

  [[nodiscard]] size_t scale_count() const {
    return is_wide()
               ? kRows
               : static_cast<size_t>(int_scale_rows(blocks_->view(), n_) * int_scale_stride(kRows));
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
