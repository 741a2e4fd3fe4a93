#include <cmath>
#include <cstdlib>
#include <string_view>
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
// Numbers are rounded before, in F32 and where SiLU is short of bits, so that a code may be the
// next one.
constexpr double kScaleError = 1e-3;

/// Rows of n as a kernel gets them and as it should make them, before they are rounded.
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

}  // namespace

Status SelfCheck::check_block_rows(const ActSpec& act, const WeightFormat& weight, int64_t n) {
  if (!rows_.emplace(act.format, n).second) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto blocks, DeviceBlocks::create(act, weight, n));
  const IntBlocks& view = blocks->view();
  const auto stride = static_cast<size_t>(int_scale_stride(kRows));
  const size_t scale_count = static_cast<size_t>(int_scale_rows(view, n)) * stride;
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer codes,
                          poisoned_device(static_cast<size_t>(kRows * n)));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer scales, poisoned_device(scale_count * sizeof(float)));
  const QuantizedRows out{act.format, codes.as<void>(), scales.as<float>(), view};
  const auto compare = [&](std::string_view kernel, const std::vector<float>& wanted) -> Status {
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), kernel));
    std::vector<int8_t> got(wanted.size());
    std::vector<float> got_scales(scale_count);
    NIBBLE_RETURN_IF_ERROR(copy_back(codes, 0, std::span(got)));
    NIBBLE_RETURN_IF_ERROR(copy_back(scales, 0, std::span(got_scales)));
    std::vector<int8_t> row(static_cast<size_t>(n));
    std::vector<float> ordered(row.size()), steps(act.blocks->bits.size() + 2);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < row.size(); ++i) {
        const size_t from = act.columns != nullptr ? static_cast<size_t>((*act.columns)[i]) : i;
        ordered[i] = wanted[r * row.size() + from];
      }
      round_blocks(*act.blocks, view.scales, ordered.data(), {row.data(), steps.data()});
      for (size_t i = 0; i < row.size(); ++i) {
        const auto b = i / static_cast<size_t>(act.blocks->block);
        const size_t step = view.scales == BlockScales::kEach ? b
                            : act.blocks->bits[b] == 4        ? kClassOf4Bits
                                                              : kClassOf8Bits;
        const int code = got[r * row.size() + i];
        const float scale = got_scales[step * stride + r];
        if (!(std::abs(code - row[i]) <= 1) ||
            !(std::fabs(scale - steps[step]) <= kScaleError * steps[step])) {
          return make_error(
              StatusCode::kUnavailable,
              "self-test: kernel {} is wrong on this GPU: of rows of {} in blocks of 4 and 8 bits, "
              "channel {} is {} times {:.6g} instead of {} times {:.6g}; serve with --device cpu, "
              "and report it",
              kernel, n, i, code, scale, static_cast<int>(row[i]), steps[step]);
        }
      }
    }
    ++checks_;
    return {};
  };
  const Rows plain = plain_rows(n);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer given, device_copy(plain.given));
  NIBBLE_RETURN_IF_ERROR(
      check(quantize_rows({.x = given.as<void>(), .rows = kRows, .n = n, .out = out}, {stream_}),
            "quantize_rows"));
  NIBBLE_RETURN_IF_ERROR(compare("quantize_rows", plain.wanted));
  // The norm of rows with weights of 1.
  std::vector<float> normed = plain.wanted;
  for (int64_t r = 0; r < kRows; ++r) {
    double squares = kEps;
    for (int64_t i = r * n; i < (r + 1) * n; ++i) {
      const double value = plain.wanted[static_cast<size_t>(i)];
      squares += value * value / static_cast<double>(n);
    }
    for (int64_t i = r * n; i < (r + 1) * n; ++i) {
      normed[static_cast<size_t>(i)] /= static_cast<float>(std::sqrt(squares));
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer floats, device_copy(plain.wanted));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer ones,
                          device_copy(std::vector<float>(static_cast<size_t>(n), 1.0F)));
  NIBBLE_RETURN_IF_ERROR(
      check(norm_quantize({.x = floats.as<float>(),
                           .norm = {GemmInput::Kind::kRmsNorm, ones.as<float>(), kEps},
                           .rows = kRows,
                           .n = n,
                           .out = out},
                          {stream_}),
            "norm_quantize"));
  NIBBLE_RETURN_IF_ERROR(compare("norm_quantize", normed));
  const Rows silu = silu_rows(n);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer gate_up, device_copy(silu.given));
  NIBBLE_RETURN_IF_ERROR(check(
      activation_quantize({.x = gate_up.as<void>(), .rows = kRows, .n = n, .out = out}, {stream_}),
      "activation_quantize"));
  return compare("activation_quantize", silu.wanted);
}

}  // namespace nibble::cuda
