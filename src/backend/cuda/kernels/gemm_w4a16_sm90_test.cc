#include "backend/cuda/kernels/gemm_w4a16_sm90.h"

#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

// The weights are rounded to BF16: 2^-9 at most for each, far less in a sum.
constexpr double kTolerance = 2e-3;

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
  testing::check_gemm(kGemmW4A16Sm90, {.scheme = "w4a16_g32",
                                       .n = 130,
                                       .k = 96,
                                       .row_counts = {1, 9, 70},
                                       .tolerance = kTolerance,
                                       .seed = 4});
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
