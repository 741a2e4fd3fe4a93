// Rows rounded to E4M3 in groups of 128, against the CPU's functions, group by group.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/kernel_families.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

using Kind = GemmInput::Kind;

// Less than a group, a part of one at the end, one and several pieces of a thread, read twice.
constexpr int64_t kWidths[] = {8, 128, 200, 576, 4096, 4104, 8200, 14336, 40968};
constexpr int64_t kRows = 5;
constexpr size_t kGuard = 64;  // elements behind the results

std::vector<uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out(values.size());
  std::ranges::transform(values, out.begin(), f32_to_bf16);
  return out;
}

/// Poisoned memory for rows in groups.
struct Groups {
  explicit Groups(int64_t n)
      : width(n),
        values(static_cast<size_t>(kRows * n) + kGuard),
        scales(static_cast<size_t>(kRows * row_scales(ActFormat::kFp8Group, n)) + kGuard) {}

  [[nodiscard]] QuantizedRows rows() const {
    return {ActFormat::kFp8Group, values.data(), scales.data()};
  }

  int64_t width;
  DeviceArray<uint8_t> values;
  DeviceArray<float> scales;
};

/// That `out` is what the CPU makes of wanted [kRows, width], to the bit.
void expect_cpus(const Groups& out, const std::vector<float>& wanted) {
  const std::vector<uint8_t> codes = out.values.host();
  const std::vector<float> scales = out.scales.host();
  const int64_t groups = row_scales(ActFormat::kFp8Group, out.width);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * kFp8GroupSize;
      const int64_t count = std::min(kFp8GroupSize, out.width - begin);
      const float* values = wanted.data() + row * out.width + begin;
      std::vector<float> rounded(static_cast<size_t>(count));
      const float scale = cpu::scalar::kRows.quantize_fp8(values, count, 0.0F, rounded.data());
      ASSERT_EQ(scales[static_cast<size_t>(row * groups + group)], scale)
          << "row " << row << " group " << group << " of rows of " << out.width;
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(codes[static_cast<size_t>(row * out.width + begin + i)],
                  encode_e4m3(rounded[static_cast<size_t>(i)]))
            << "row " << row << " element " << begin + i << " of " << out.width;
      }
    }
  }
  EXPECT_TRUE(std::ranges::all_of(codes.end() - kGuard, codes.end(),
                                  [](uint8_t code) { return code == 0xff; }));
  EXPECT_TRUE(std::ranges::all_of(scales.end() - kGuard, scales.end(),
                                  [](float scale) { return std::isnan(scale); }));
}

/// What the CPU makes of rows [kRows, n] in front of a product.
template <typename T>
std::vector<float> inputs(const std::vector<T>& x, int64_t n, const GemmInput& input) {
  const auto type = sizeof(T) == 2 ? cpu::Element::kBf16 : cpu::Element::kF32;
  std::vector<float> out(static_cast<size_t>(kRows * n));
  for (int64_t row = 0; row < kRows; ++row) {
    cpu::scalar::kRows.make_input({.x = {x.data() + row * n, type}, .k = n, .input = input},
                                  out.data() + row * n);
  }
  return out;
}

TEST(RowGroups, OfRowsAreTheCpus) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t n : kWidths) {
    auto values = random_values(static_cast<size_t>(kRows * n), 3, 1.0F);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] *= std::exp2(static_cast<float>(i / 100 % 40) - 20.0F);  // groups of all sizes
    }
    std::fill_n(values.begin() + 2 * n, n, 0.0F);
    const std::vector<uint16_t> bits = to_bf16(values);
    std::ranges::transform(bits, values.begin(), bf16_to_f32);
    const DeviceArray<uint16_t> x(bits);
    const Groups out(n);
    ASSERT_EQ(quantize_rows({.x = x.data(), .rows = kRows, .n = n, .out = out.rows()}, {}),
              cudaSuccess);
    expect_cpus(out, values);
  }
}

TEST(RowGroups, OfNormsAndReluAreTheCpus) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t n : kWidths) {
    const auto x = random_values(static_cast<size_t>(kRows * n), 5, 2.0F);
    const auto weight = random_values(static_cast<size_t>(n), 6, 1.0F);
    const auto bias = random_values(static_cast<size_t>(n), 7, 1.0F);
    const DeviceArray<float> device_x(x), device_weight(weight), device_bias(bias);
    for (const Kind kind : {Kind::kRmsNorm, Kind::kLayerNorm}) {
      if (n <= 128) {
        continue;  // the CPU adds short rows in another order
      }
      const Groups out(n);
      ASSERT_EQ(norm_quantize({.x = device_x.data(),
                               .norm = {kind, device_weight.data(), 1e-5F, device_bias.data()},
                               .rows = kRows,
                               .n = n,
                               .out = out.rows()},
                              {}),
                cudaSuccess);
      expect_cpus(out, inputs(x, n, {kind, weight.data(), 1e-5F, bias.data()}));
    }
    const std::vector<uint16_t> bits = to_bf16(x);
    const DeviceArray<uint16_t> device_bits(bits);
    const Groups out(n);
    ASSERT_EQ(activation_quantize({.x = device_bits.data(),
                                   .kind = Kind::kRelu,
                                   .rows = kRows,
                                   .n = n,
                                   .out = out.rows()},
                                  {}),
              cudaSuccess);
    expect_cpus(out, inputs(bits, n, {Kind::kRelu}));
  }
}

// Also where rows in the token forms take clusters (activation.cu).
TEST(RowGroups, OfSiluAreNearTheFormula) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t n : kWidths) {
    const auto width = static_cast<size_t>(n);
    const std::vector<uint16_t> bits = to_bf16(random_values(2 * kRows * width, 9, 1.0F));
    const DeviceArray<uint16_t> x(bits);
    const Groups out(n);
    ASSERT_EQ(activation_quantize({.x = x.data(), .rows = kRows, .n = n, .out = out.rows()}, {}),
              cudaSuccess);
    const std::vector<uint8_t> codes = out.values.host();
    const std::vector<float> scales = out.scales.host();
    const auto groups = static_cast<size_t>(row_scales(ActFormat::kFp8Group, n));
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t i = 0; i < width; ++i) {
        const double gate = bf16_to_f32(bits[2 * row * width + i]);
        const double up = bf16_to_f32(bits[(2 * row + 1) * width + i]);
        const double wanted = gate / (1.0 + std::exp(-gate)) * up;
        const double scale = scales[row * groups + i / static_cast<size_t>(kFp8GroupSize)];
        ASSERT_NEAR(decode_e4m3(codes[row * width + i]) * scale, wanted,
                    std::fabs(wanted) * 0x1.02p-4 + scale * 0x1.01p-9)
            << "row " << row << " element " << i << " of " << n;
      }
    }
  }
}

TEST(RowGroups, ThatAreNotFiniteHaveNanScales) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kWidth = 320;  // three groups
  auto values = random_values(static_cast<size_t>(kRows * kWidth), 7, 1.0F);
  values[130] = std::numeric_limits<float>::infinity();
  values[kWidth + 319] = std::numeric_limits<float>::quiet_NaN();
  const DeviceArray<uint16_t> x(to_bf16(values));
  const Groups out(kWidth);
  ASSERT_EQ(quantize_rows({.x = x.data(), .rows = kRows, .n = kWidth, .out = out.rows()}, {}),
            cudaSuccess);
  const std::vector<float> scales = out.scales.host();
  for (size_t group = 0; group < 3 * kRows; ++group) {
    EXPECT_EQ(std::isnan(scales[group]), group == 1 || group == 5) << group;
  }
}

}  // namespace
}  // namespace nibble::cuda
