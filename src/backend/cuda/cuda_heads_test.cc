#include "backend/cuda/cuda_heads.h"

#include <cmath>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/self_check.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/heads_bench.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::HeadsBench;
using testing::random_bits;

struct HeadsShape {
  int64_t heads, n, k;
};

void check_heads(HeadsBench& bench, const HeadsShape& shape, int64_t m, bool f32) {
  const auto [heads, n, k] = shape;
  SCOPED_TRACE(::testing::Message() << heads << " heads [" << n << ", " << k << "], " << m
                                    << " rows, " << (f32 ? "f32" : "bf16"));
  const std::vector<uint16_t> weights = random_bits(static_cast<size_t>(heads * n * k), 1);
  std::vector<float> wide(weights.size());
  std::ranges::transform(weights, wide.begin(), bf16_to_f32);
  std::vector<QuantView> views;
  for (int64_t head = 0; head < heads; ++head) {
    const auto at = static_cast<size_t>(head * n * k);
    views.push_back({.format = {.code = f32 ? WeightCode::kF32 : WeightCode::kBf16},
                     .n = n,
                     .k = k,
                     .codes = f32 ? reinterpret_cast<const std::byte*>(wide.data() + at)
                                  : reinterpret_cast<const std::byte*>(weights.data() + at)});
  }
  ASSERT_TRUE(CudaHeads::takes(views));
  auto prepared = CudaHeads::create(views, bench.context());
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  EXPECT_EQ((*prepared)->weight_bytes(), heads * n * k * 2);
  // Rows wider than what is multiplied, and results between others'.
  const int64_t x_head = k + 8;
  const int64_t x_stride = heads * x_head + 16;
  const int64_t y_head = n + 8;
  const int64_t y_stride = heads * y_head;
  const std::vector<uint16_t> x = random_bits(static_cast<size_t>(m * x_stride), 2);
  const DeviceArray<uint16_t> device_x(x);
  const DeviceArray<uint16_t> y(static_cast<size_t>(m * y_stride));
  (*prepared)->run({.x = {device_x.data(), DType::kBF16},
                    .x_stride = x_stride,
                    .x_head = x_head,
                    .m = m,
                    .y = {y.data(), DType::kBF16},
                    .y_stride = y_stride,
                    .y_head = y_head});
  ASSERT_EQ(cudaStreamSynchronize(bench.stream), cudaSuccess);
  const std::vector<uint16_t> got = y.host();
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t i = 0; i < y_stride; ++i) {
      const int64_t head = i / y_head;
      const int64_t column = i % y_head;
      const float value = bf16_to_f32(got[static_cast<size_t>(row * y_stride + i)]);
      if (column >= n) {
        ASSERT_TRUE(std::isnan(value)) << "written beside the result";
        continue;
      }
      double want = 0.0;
      for (int64_t j = 0; j < k; ++j) {
        want += static_cast<double>(
                    bf16_to_f32(x[static_cast<size_t>(row * x_stride + head * x_head + j)])) *
                wide[static_cast<size_t>((head * n + column) * k + j)];
      }
      ASSERT_NEAR(value, want, 0.005 * std::fabs(want) + 0.02)
          << "row " << row << ", head " << head << ", column " << column;
    }
  }
}

TEST(CudaHeads, MultipliesEveryHeadByItsMatrix) {
  NIBBLE_NEEDS_GPU();
  HeadsBench bench;
  for (const int64_t m : {1, 2, 3, 4, 5, 17, 64}) {
    check_heads(bench, {8, 512, 128}, m, false);
    check_heads(bench, {8, 128, 512}, m, false);
    check_heads(bench, {2, 520, 136}, m, false);
    check_heads(bench, {2, 136, 504}, m, false);
    check_heads(bench, {3, 32, 16}, m, true);
    check_heads(bench, {1, 8, 64}, m, false);
  }
}

/// Rows that all heads read, times their matrices or, transposed, from the other side.
void check_shared_rows(HeadsBench& bench, const HeadsShape& shape, int64_t m, bool transposed) {
  const auto [heads, n, k] = shape;
  SCOPED_TRACE(::testing::Message() << heads << " heads [" << n << ", " << k << "], " << m
                                    << (transposed ? " rows, transposed" : " rows"));
  const std::vector<uint16_t> weights = random_bits(static_cast<size_t>(heads * n * k), 1);
  const auto prepared = bench.prepare(weights, n, k);
  const int64_t width = transposed ? n : k;   // of x
  const int64_t result = transposed ? k : n;  // of y
  const int64_t x_stride = width + 24;
  const std::vector<uint16_t> x = random_bits(static_cast<size_t>(m * x_stride), 2);
  const DeviceArray<uint16_t> device_x(x);
  const DeviceArray<uint16_t> y(static_cast<size_t>(m * heads * result));
  const HeadsArgs args{.x = {device_x.data(), DType::kBF16},
                       .x_stride = x_stride,
                       .x_head = 0,
                       .m = m,
                       .y = {y.data(), DType::kBF16},
                       .y_stride = heads * result,
                       .y_head = result};
  transposed ? prepared->run_transposed(args) : prepared->run(args);
  ASSERT_EQ(cudaStreamSynchronize(bench.stream), cudaSuccess);
  const std::vector<uint16_t> got = y.host();
  for (int64_t i = 0; i < std::ssize(got); ++i) {
    const int64_t row = i / (heads * result);
    const int64_t head = i / result % heads;
    const int64_t column = i % result;
    double want = 0.0;
    for (int64_t j = 0; j < width; ++j) {
      const int64_t at = transposed ? j * k + column : column * k + j;
      want += static_cast<double>(bf16_to_f32(x[static_cast<size_t>(row * x_stride + j)])) *
              bf16_to_f32(weights[static_cast<size_t>(head * n * k + at)]);
    }
    ASSERT_NEAR(bf16_to_f32(got[static_cast<size_t>(i)]), want, 0.005 * std::fabs(want) + 0.02)
        << "row " << row << ", head " << head << ", column " << column;
  }
}

TEST(CudaHeads, AllHeadsMayReadTheSameRows) {
  NIBBLE_NEEDS_GPU();
  HeadsBench bench;
  for (const bool transposed : {false, true}) {
    for (const int64_t m : {1, 3, 128}) {
      check_shared_rows(bench, {5, 512, 128}, m, transposed);
      check_shared_rows(bench, {5, 128, 512}, m, transposed);
      check_shared_rows(bench, {1, 24, 16}, m, transposed);
    }
  }
}

TEST(CudaHeads, LeavesOtherShapesToProductsOfOneHead) {
  QuantView view{.format = {.code = WeightCode::kBf16}, .n = 12, .k = 16};
  EXPECT_FALSE(CudaHeads::takes({&view, 1}));
  view.n = 16;
  EXPECT_TRUE(CudaHeads::takes({&view, 1}));
  view.format.code = WeightCode::kInt8;
  EXPECT_FALSE(CudaHeads::takes({&view, 1}));
}

TEST(SelfCheck, LatentAttention) {
  NIBBLE_NEEDS_GPU();
  HeadsBench bench;
  SelfCheck check(bench.stream);
  for (const int32_t heads : {1, 4, 16, 20, 64}) {
    for (const int32_t row_dim : {40, 96, 576}) {
      LatentShape shape{.row_dim = row_dim, .heads = heads};
      shape.scale = 1.0F / std::sqrt(static_cast<float>(row_dim));
      const Status status = check.check_latent(shape);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
  EXPECT_EQ(check.checks(), 15);
}

TEST(SelfCheck, ExpandedLatentAttention) {
  NIBBLE_NEEDS_GPU();
  HeadsBench bench;
  if (!bench.device.hopper()) {
    GTEST_SKIP() << "the kernel is made for sm_90 alone";
  }
  SelfCheck check(bench.stream);
  for (const int32_t heads : {1, 2, 64, 128}) {
    for (const int32_t page : {16, 64}) {
      const Status status =
          check.check_expanded({.page_size = page, .row_dim = 576, .heads = heads});
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
  EXPECT_EQ(check.checks(), 6);  // heads beyond a few are not more
}

}  // namespace
}  // namespace nibble::cuda
