// Activations whose rows are turned, beside the CPU's.

#include <cmath>
#include <utility>
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

constexpr float kLimit = 1.5F;
constexpr size_t kGuard = 64;

struct Case {
  Kind kind = Kind::kSiluMul;
  int64_t n = 0;
  int64_t turn = 0;
  int64_t rows = 0;
  int64_t stride = 0;
  std::vector<uint16_t> bits;  // [rows, stride]
};

/// What the CPU hands to the rounding of a row.
std::vector<float> cpu_row(const Case& of, int64_t row, ActFormat format) {
  const bool int8 = format == ActFormat::kInt8Token;
  std::vector<float> values(static_cast<size_t>(of.n));
  cpu::scalar::kRows.make_input({.x = {of.bits.data() + row * of.stride, cpu::Element::kBf16},
                                 .k = of.n,
                                 .input = {.kind = of.kind, .limit = kLimit, .turn = of.turn},
                                 .silu = int8 ? silu_of_int8(of.kind) : SiluForm{}},
                                values.data());
  return values;
}

void expect_cpu_codes(const Case& of, const uint8_t* codes, const float* scales) {
  for (int64_t row = 0; row < of.rows; ++row) {
    const std::vector<float> values = cpu_row(of, row, ActFormat::kInt8Token);
    std::vector<uint8_t> wanted(static_cast<size_t>((of.n + 511) / 512 * 512));
    const cpu::Int8RowResult result = cpu::scalar::kRows.quantize_int8(
        {.x = {values.data(), cpu::Element::kF32}, .k = of.n, .offset = 0, .out = wanted.data()});
    EXPECT_EQ(result.scale, scales[row]);
    for (int64_t i = 0; i < of.n; ++i) {
      ASSERT_EQ(wanted[static_cast<size_t>(i)], codes[row * of.n + i])
          << "row " << row << " element " << i << " of " << of.n << " by " << of.turn;
    }
  }
}

void expect_near(const Case& of, ActFormat format, const uint8_t* bytes, const float* scales) {
  const int64_t groups = row_scales(format, of.n);
  const int64_t size = format == ActFormat::kFp8Group ? kFp8GroupSize : of.n;
  for (int64_t row = 0; row < of.rows; ++row) {
    const std::vector<float> values = cpu_row(of, row, format);
    float absmax = 0.0F;
    for (const float value : values) {
      absmax = std::fmax(absmax, std::fabs(value));
    }
    for (int64_t i = 0; i < of.n; ++i) {
      const int64_t at = row * of.n + i;
      const float want = values[static_cast<size_t>(i)];
      double got = 0.0;
      double bound = std::fabs(want) * 0x1.01p-8 + absmax * 1e-5;
      if (format == ActFormat::kBf16) {
        got = bf16_to_f32(static_cast<uint16_t>(bytes[2 * at] | bytes[2 * at + 1] << 8));
      } else {
        got = static_cast<double>(decode_e4m3(bytes[at])) * scales[row * groups + i / size];
        bound = std::fabs(want) * 0x1.01p-4 + absmax / 448 * 0x1.01p-10 + absmax * 1e-5;
      }
      ASSERT_NEAR(got, want, bound) << "row " << row << " element " << i << " of " << of.n;
    }
  }
}

void check_form(const Case& of, const DeviceArray<uint16_t>& x, ActFormat format) {
  const auto bytes = static_cast<size_t>(of.rows * of.n * (format == ActFormat::kBf16 ? 2 : 1));
  const DeviceArray<uint8_t> values(bytes + kGuard);
  const DeviceArray<float> scales(static_cast<size_t>(of.rows * (of.n / 128 + 1)) + kGuard);
  ASSERT_EQ(activation_quantize({.x = x.data(),
                                 .kind = of.kind,
                                 .stride = of.stride,
                                 .rows = of.rows,
                                 .n = of.n,
                                 .out = {format, values.data(), scales.data()},
                                 .limit = kLimit,
                                 .turn = of.turn},
                                {}),
            cudaSuccess);
  const std::vector<uint8_t> got = values.host();
  for (size_t i = bytes; i < got.size(); ++i) {
    ASSERT_EQ(got[i], 0xff) << "written behind the values";
  }
  if (format != ActFormat::kInt8Token) {
    expect_near(of, format, got.data(), scales.host().data());
  } else if (of.kind != Kind::kGeluTanh) {  // which keeps all of its bits
    expect_cpu_codes(of, got.data(), scales.host().data());
  }
}

// In front of INT8 the CPU's bits; in other forms nearly.
TEST(TurnedRows, AgreeWithTheCpu) {
  NIBBLE_NEEDS_GPU();
  uint32_t seed = 190;
  for (const auto& [n, turn] : std::vector<std::pair<int64_t, int64_t>>{{8, 2},
                                                                        {8, 8},
                                                                        {264, 8},
                                                                        {1536, 512},
                                                                        {1536, 2},
                                                                        {768, 256},
                                                                        {4096, 4096},
                                                                        {8192, 8192},
                                                                        {14336, 2048},
                                                                        {11008, 256},
                                                                        {16384, 16384},
                                                                        {28672, 4096}}) {
    for (const Kind kind : kActivations) {
      const int64_t width = input_width(kind, n);
      for (const int64_t rows : {1, 3, 17}) {
        Case of{.kind = kind, .n = n, .turn = turn, .rows = rows, .stride = width};
        of.stride += rows == 3 ? 8 : 0;
        for (const float value :
             random_values(static_cast<size_t>(rows * of.stride), ++seed, 2.0F)) {
          of.bits.push_back(f32_to_bf16(value));
        }
        const DeviceArray<uint16_t> x(of.bits);
        for (const ActFormat format : {ActFormat::kBf16, ActFormat::kInt8Token,
                                       ActFormat::kFp8Token, ActFormat::kFp8Group}) {
          check_form(of, x, format);
        }
      }
    }
  }
}

TEST(TurnedRows, OfWidthsThatCannotBeTurnedAreRefused) {
  NIBBLE_NEEDS_GPU();
  const DeviceArray<uint16_t> x(64);
  const DeviceArray<uint8_t> values(64);
  const auto turned = [&](int64_t n, int64_t turn) {
    return activation_quantize({.x = x.data(),
                                .rows = 1,
                                .n = n,
                                .out = {ActFormat::kBf16, values.data(), nullptr},
                                .turn = turn},
                               {});
  };
  EXPECT_EQ(turned(24, 16), cudaErrorInvalidValue);  // does not divide it
  EXPECT_EQ(turned(24, 12), cudaErrorInvalidValue);  // no power of two
  EXPECT_EQ(turned(most_turned() / 8 * 8 + 8, 8), cudaErrorInvalidValue);
  EXPECT_EQ(turned(24, 8), cudaSuccess);
}

// Wide rows need more shared memory than a kernel has by itself.
TEST(TurnedRows, MayBeRecorded) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kWidth = 14336;
  const DeviceArray<uint16_t> x(std::vector<uint16_t>(2 * kWidth, f32_to_bf16(0.5F)));
  const DeviceArray<uint8_t> values(kWidth);
  const DeviceArray<float> scales(1);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t recorded = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(activation_quantize({.x = x.data(),
                                 .rows = 1,
                                 .n = kWidth,
                                 .out = {ActFormat::kInt8Token, values.data(), scales.data()},
                                 .turn = 2048},
                                {stream}),
            cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&recorded, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(recorded, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  const std::vector<uint8_t> codes = values.host();
  EXPECT_EQ(codes[0], 127);  // a block of equal numbers becomes one
  EXPECT_EQ(codes[1], 0);
  EXPECT_EQ(codes[2048], 127);
  EXPECT_EQ(cudaGraphExecDestroy(recorded), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace nibble::cuda
