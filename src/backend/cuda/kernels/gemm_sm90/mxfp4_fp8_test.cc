// How far apart the powers of two of MXFP4 lie within a row, which gemm_sm90/mxfp4_fp8.cu takes
// into its operands.

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/testing/gpu_test.h"
#include "quant/codec.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;

constexpr int64_t kGroup = 32;

/// A matrix on the host and, packed, on the GPU.
class Packed final {
 public:
  explicit Packed(const QuantTensor& weight) {
    const GemmProblem problem{weight.format, ActFormat::kFp8Token, weight.n, weight.k};
    const DeviceInfo device = query_device(0).value();
    EXPECT_TRUE(kGemmMxfp4Fp8Sm90.accepts(problem, device));
    kernel_ = kGemmMxfp4Fp8Sm90.make(problem, device).value();
    packed_ = std::make_unique<DeviceArray<uint8_t>>(kernel_->packed_bytes());
    const auto codes = weight.codes.as<uint8_t>();
    const auto scales = weight.scales.as<float>();
    const DeviceArray<uint8_t> device_codes(std::vector<uint8_t>(codes.begin(), codes.end()));
    const DeviceArray<float> device_scales(std::vector<float>(scales.begin(), scales.end()));
    EXPECT_EQ(kernel_->pack(device_codes.data(), device_scales.data(), packed_->data(), nullptr),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  void expect_unpacks_to(const QuantTensor& weight) const {
    const auto codes = weight.codes.as<uint8_t>();
    const auto scales = weight.scales.as<float>();
    const DeviceArray<uint8_t> codes_back(codes.size());
    const DeviceArray<float> scales_back(scales.size());
    EXPECT_EQ(kernel_->unpack(packed_->data(), codes_back.data(), scales_back.data(), nullptr),
              cudaSuccess);
    EXPECT_TRUE(std::ranges::equal(codes_back.host(), codes));
    EXPECT_TRUE(std::ranges::equal(scales_back.host(), scales));
  }

  /// y [m, n] of rows x [m, k] in E4M3, whose scales are 1.
  [[nodiscard]] std::vector<float> multiply(const std::vector<uint8_t>& x, int64_t m, int64_t n) {
    const DeviceArray<uint8_t> rows(x);
    const DeviceArray<float> scales(std::vector<float>(static_cast<size_t>(m), 1.0F));
    const DeviceArray<float> y(static_cast<size_t>(m * n));
    DeviceArray<uint8_t> workspace(kernel_->workspace_bytes(m));
    workspace.zero();
    EXPECT_EQ(kernel_->run({.x = rows.data(),
                            .x_scales = scales.data(),
                            .packed = packed_->data(),
                            .y = y.data(),
                            .y_stride = n,
                            .m = m,
                            .result = GemmResult::kF32,
                            .workspace = workspace.data()},
                           {}),
              cudaSuccess);
    return y.host();
  }

 private:
  std::unique_ptr<GemmKernel> kernel_;
  std::unique_ptr<DeviceArray<uint8_t>> packed_;
};

/// Random codes; scale_of(row, group) is a power of two's exponent.
template <typename ScaleOf>
QuantTensor random_weight(int64_t n, int64_t k, const ScaleOf& scale_of) {
  QuantTensor weight = QuantTensor::allocate(find_scheme("mxfp4_fp8").value().weight, n, k).value();
  std::mt19937 random(static_cast<uint32_t>(n));
  std::ranges::generate(weight.codes.as<uint8_t>(),
                        [&random] { return static_cast<uint8_t>(random()); });
  for (int64_t i = 0; i < n * k / kGroup; ++i) {
    weight.scales.as<float>()[static_cast<size_t>(i)] =
        std::ldexp(1.0F, scale_of(i / (k / kGroup), i % (k / kGroup)));
  }
  return weight;
}

TEST(GemmMxfp4Fp8Sm90, EveryPowerIsUnpackedAsItWas) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kN = 130, kK = 448;
  std::mt19937 random(3);
  QuantTensor weight = random_weight(
      kN, kK, [&random](int64_t, int64_t) { return static_cast<int>(random() % 255) - 127; });
  // Groups and rows of zeros, of either sign, whose powers count for nothing.
  const auto codes = weight.codes.as<uint8_t>();
  std::fill_n(codes.begin() + kK / 2, kK / 2, uint8_t{0x80});
  std::fill_n(codes.begin() + 3 * kK / 2 + 16, 16, uint8_t{0});
  const Packed packed(weight);
  packed.expect_unpacks_to(weight);
}

// Groups lie up to 23 powers below the largest of their row. A row of x has one group alone, so
// that small groups are not lost beside large ones.
TEST(GemmMxfp4Fp8Sm90, GroupsFarBelowTheLargestAreRoundedToE4M3) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kN = 70, kK = 1024, kGroups = kK / kGroup;
  constexpr int kTop = 5;
  const auto distance = [](int64_t row, int64_t group) {
    return static_cast<int>((row + group) % 24);
  };
  const QuantTensor weight = random_weight(
      kN, kK, [&](int64_t row, int64_t group) { return kTop - distance(row, group); });
  std::vector<uint8_t> x(kGroups * kK);
  std::mt19937 random(4);
  for (int64_t group = 0; group < kGroups; ++group) {
    for (int64_t i = 0; i < kGroup; ++i) {
      const auto code = static_cast<uint8_t>(random());
      x[static_cast<size_t>(group * kK + group * kGroup + i)] = (code & 0x7f) == 0x7f ? 0 : code;
    }
  }
  Packed packed(weight);
  packed.expect_unpacks_to(weight);
  const std::vector<float> y = packed.multiply(x, kGroups, kN);
  const auto codes = weight.codes.as<uint8_t>();
  for (int64_t group = 0; group < kGroups; ++group) {
    for (int64_t row = 0; row < kN; ++row) {
      double sum = 0.0, magnitudes = 0.0;
      const int d = distance(row, group);
      for (int64_t i = group * kGroup; i < (group + 1) * kGroup; ++i) {
        const int byte = codes[static_cast<size_t>((row * kK + i) / 2)];
        const float code = decode_e2m1(static_cast<uint8_t>(byte >> (i % 2 * 4) & 15));
        const double exact = std::ldexp(code, 6 - d);
        const double rounded = decode_e4m3(encode_e4m3(static_cast<float>(exact)));
        EXPECT_TRUE(d > 14 || rounded == exact);
        const double product = rounded * decode_e4m3(x[static_cast<size_t>(group * kK + i)]);
        sum += product;
        magnitudes += std::fabs(product);
      }
      const double unit = std::ldexp(1.0, kTop - 6);
      ASSERT_NEAR(y[static_cast<size_t>(group * kN + row)], unit * sum, unit * magnitudes * 0x1p-9)
          << "row " << row << " group " << group << ", " << d << " powers below the largest";
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
