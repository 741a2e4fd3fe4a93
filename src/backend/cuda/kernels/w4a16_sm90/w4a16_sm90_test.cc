#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"

#include "backend/cuda/kernels/w4a16_sm90/decode.h"
#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

// The weights are rounded to BF16: 2^-9 at most for each, far less in a sum.
constexpr double kTolerance = 2e-3;

// The last of them where a sanitizer makes each take minutes.
std::vector<int64_t> few_rows(const std::vector<int64_t>& row_counts) {
  return testing::brief_tests() ? std::vector{row_counts.back()} : row_counts;
}

TEST(GemmW4A16Sm90, EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  for (const std::string_view scheme : {"w4a16_g128", "w4a16_g32"}) {
    testing::check_gemm(
        kGemmW4A16Sm90,
        {.scheme = scheme, .n = 64, .k = 128, .row_counts = {1, 3, 17}, .tolerance = kTolerance});
    testing::check_gemm(kGemmW4A16Sm90, {.scheme = scheme,
                                         .n = 200,
                                         .k = 1280,
                                         .row_counts = {1, 16, 33, 65, 130, 300, 600},
                                         .tolerance = kTolerance,
                                         .seed = 2});
    testing::check_gemm(kGemmW4A16Sm90, {.scheme = scheme,
                                         .n = 2051,
                                         .k = 640,
                                         .row_counts = {3},
                                         .tolerance = kTolerance,
                                         .seed = 3});
  }
  testing::check_gemm(kGemmW4A16Sm90, {.scheme = "w4a16_g128",
                                       .n = 1040,
                                       .k = 4224,
                                       .row_counts = {17, 64, 100, 200, 256},
                                       .tolerance = kTolerance,
                                       .seed = 5});
  testing::check_gemm(kGemmW4A16Sm90, {.scheme = "w4a16_g32",
                                       .n = 130,
                                       .k = 96,
                                       .row_counts = {1, 9, 70},
                                       .tolerance = kTolerance,
                                       .seed = 4});
}

// What decides how a few tokens' product is dealt out: tiles of one slice and of many, more tiles
// than blocks, rows and K that end within a tile, clusters.
TEST(GemmW4A16Sm90, FewTokensEqualTheReference) {
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  struct Shape {
    int64_t n, k;
    std::vector<int64_t> row_counts;
  };
  const Shape shapes[] = {
      {6160, 1024, {1, 5, 9, 16}}, {9000, 384, {1, 3, 9, 15}}, {40000, 256, {1, 4, 11, 16}},
      {64, 8192, {1, 8, 10, 16}},  {1040, 4224, {2, 13}},      {4200, 1152, {1, 7, 12}},
      {2051, 6272, {9, 14}},       {28000, 640, {9, 16}},      {1, 128, {2, 16}}};
  uint32_t seed = 10;
  for (const std::string_view scheme : {"w4a16_g128", "w4a16_g32"}) {
    for (const Shape& shape : shapes) {
      if (testing::brief_tests() && shape.n * shape.k > 4 << 20) {
        continue;
      }
      testing::check_gemm(kGemmW4A16Sm90, {.scheme = scheme,
                                           .n = shape.n,
                                           .k = shape.k,
                                           .row_counts = few_rows(shape.row_counts),
                                           .tolerance = kTolerance,
                                           .seed = ++seed});
    }
  }
  testing::check_gemm(kGemmW4A16Sm90, {.scheme = "w4a16_g32",
                                       .n = 2051,
                                       .k = 1312,
                                       .row_counts = few_rows({1, 6, 10}),
                                       .tolerance = kTolerance,
                                       .seed = 9});
}

// Two blocks share K and send each other sums.
TEST(GemmW4A16Sm90, FewTokensInClusters) {
  constexpr int64_t kDepth = 8320;
  for (const int64_t n : {40, 72}) {
    for (const int group : {32, 128}) {
      ASSERT_EQ(plan_w4a16_decode(n, kDepth, group, 16, 132).cluster, 2);
    }
  }
  NIBBLE_NEEDS_GPU();
  if (!query_device(0).value().hopper()) {
    GTEST_SKIP() << "needs a Hopper GPU";
  }
  uint32_t seed = 40;
  for (const std::string_view scheme : {"w4a16_g128", "w4a16_g32"}) {
    for (const int64_t n : {40, 72}) {
      if (testing::brief_tests() && n == 72) {
        continue;
      }
      testing::check_gemm(kGemmW4A16Sm90, {.scheme = scheme,
                                           .n = n,
                                           .k = kDepth,
                                           .row_counts = few_rows({1, 2, 7, 16}),
                                           .tolerance = kTolerance,
                                           .seed = ++seed});
    }
  }
}

TEST(GemmW4A16Sm90, PlansForFewTokensFit) {
  for (const int64_t n : {16, 64, 200, 2051, 6144, 8192, 28672, 40000, 128256}) {
    for (const int64_t k : {128, 640, 4096, 14336, 28672}) {
      for (int64_t m = 1; m <= kW4A16DecodeTokens; ++m) {
        for (const int sms : {8, 114, 132}) {
          for (const int group : {32, 128}) {
            const W4A16DecodePlan plan = plan_w4a16_decode(n, k, group, m, sms);
            const int tokens = m <= 8 ? 8 : 16;
            SCOPED_TRACE(::testing::Message() << n << " x " << k << " m " << m << " sms " << sms);
            EXPECT_GE(plan.tile * plan.tiles, plan.slices);
            EXPECT_LE(plan.blocks, sms);
            EXPECT_EQ(plan.blocks % plan.cluster, 0);
            EXPECT_GE(2 * plan.row_warps, plan.tile);
            EXPECT_LE(plan.warps, kW4A16DecodeWarps);
            EXPECT_EQ(plan.row_warps * plan.k_warps, plan.warps);
            EXPECT_EQ(plan.k_warps % plan.step_pairs, 0);
            EXPECT_EQ(plan.least * plan.tiles + plan.larger, plan.slices);
            EXPECT_EQ(plan.tile, plan.least + (plan.larger > 0 ? 1 : 0));
            EXPECT_EQ(plan.sets * plan.step_pairs, plan.k_warps);
            EXPECT_GE(plan.stages, std::max(plan.sets, 2));
            EXPECT_EQ(plan.stages % plan.sets, 0);  // each stage falls to one set of warps
            EXPECT_TRUE(plan.cluster == 1 || plan.blocks == plan.tiles * plan.cluster);
            EXPECT_LE(plan.tile, kW4A16DecodeMostTile);
            EXPECT_LE(plan.stages, kW4A16DecodeStages);
            const int slice = group == 32 ? 1152 : 1056;
            EXPECT_LE(plan.weights_at + plan.step_pairs * plan.tile * slice, plan.stage_bytes);
            EXPECT_EQ(plan.stage_bytes % 1024, 0);
            EXPECT_EQ(plan.ring_bytes, plan.stages * plan.stage_bytes);
            EXPECT_LE(plan.ring_bytes + w4a16_decode_rest(tokens, plan.warps), kW4A16DecodeShared);
          }
        }
      }
    }
  }
}

TEST(GemmW4A16Sm90, RefusesOtherWeights) {
  const WeightFormat g128{.code = WeightCode::kInt4,
                          .scale_per = ScalePer::kGroup,
                          .group_size = 128,
                          .scale_dtype = DType::kBF16};
  const DeviceInfo hopper{.major = 9};
  EXPECT_TRUE(kGemmW4A16Sm90.accepts({.weight = g128, .n = 64, .k = 256}, hopper));
  EXPECT_FALSE(kGemmW4A16Sm90.accepts({.weight = g128, .n = 64, .k = 192}, hopper));
  EXPECT_FALSE(kGemmW4A16Sm90.accepts({.weight = g128, .n = 64, .k = 256}, {.major = 8}));
  WeightFormat asymmetric = g128;
  asymmetric.zero_points = ZeroPoints::kPerScale;
  EXPECT_FALSE(kGemmW4A16Sm90.accepts({.weight = asymmetric, .n = 64, .k = 256}, hopper));
}

}  // namespace
}  // namespace nibble::cuda
