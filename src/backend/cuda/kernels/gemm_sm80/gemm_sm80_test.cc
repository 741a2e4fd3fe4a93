#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

#include <optional>
#include <utility>
#include <vector>

#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

// Rows at the edges of a tile of channels, k short of the ring, split and odd, every token tile.
void check_shapes(const GemmEntry& entry,
                  std::string_view scheme,
                  int64_t least_k,
                  const std::optional<WeightFormat>& format = std::nullopt) {
  testing::GemmCheck check{.scheme = scheme, .format = format};
  const auto run = [&](int64_t n, int64_t k, std::vector<int64_t> row_counts) {
    check.n = n;
    check.k = k;
    check.row_counts = std::move(row_counts);
    testing::check_gemm(entry, check);
    ++check.seed;
  };
  run(8, least_k, {1, 8, 9});
  run(136, int64_t{5} * 128, {3, 17, 130});
  run(256, 4096, {1, 16, 65});
}

WeightFormat groups_of_32(WeightCode code, ZeroPoints zero_points) {
  return {code, ScalePer::kGroup, 32, DType::kBF16, zero_points};
}

TEST(GemmSm80, W4A8EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW4A8Sm80, "w4a8", 64);
}

TEST(GemmSm80, W8A8Int8EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW8A8Int8Sm80, "w8a8_int8", 64);
}

// Whether this GPU and this build have instructions for FP8.
bool takes_fp8() {
  return kGemmW8A8Fp8Sm89.accepts(
      {.weight = find_scheme("w8a8_fp8")->weight, .act = ActFormat::kFp8Token, .n = 8, .k = 64},
      query_device(0).value());
}

TEST(GemmSm80, W8A8Fp8EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  if (!takes_fp8()) {
    GTEST_SKIP() << "no instructions for FP8";
  }
  check_shapes(kGemmW8A8Fp8Sm89, "w8a8_fp8", 64);
  testing::check_gemm(
      kGemmW8A8Fp8Sm89,
      {.scheme = "w8a8_fp8", .n = 1001, .k = 576, .row_counts = {1, 3, 17, 64, 200}, .seed = 4});
}

// Also with half a group at the end, so that the rows of scales have odd lengths.
TEST(GemmSm80, W8A8Fp8InBlocksEqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  if (!takes_fp8()) {
    GTEST_SKIP() << "no instructions for FP8";
  }
  check_shapes(kGemmW8A8Fp8BlockSm89, "w8a8_fp8_block", 64);
  testing::check_gemm(kGemmW8A8Fp8BlockSm89, {.scheme = "w8a8_fp8_block",
                                              .n = 1001,
                                              .k = 576,
                                              .row_counts = {1, 3, 17, 64, 200},
                                              .seed = 4});
}

// Also as an output head: an odd number of rows, tiles and splits of k both.
TEST(GemmSm80, W8A16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW8A16Sm80, "w8a16_channel", 64);
  testing::check_gemm(kGemmW8A16Sm80, {.scheme = "w8a16_channel",
                                       .n = 1001,
                                       .k = 576,
                                       .row_counts = {1, 3, 17, 64, 200},
                                       .seed = 4});
}

TEST(GemmSm80, W4A16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW4A16ChannelSm80, "w4a16_channel", 64);
  check_shapes(kGemmW4A16Sm80, "w4a16_g32", 64);
  check_shapes(kGemmW4A16Sm80, "w4a16_g128", 128);
}

TEST(GemmSm80, W4A16WithZeroPointsEqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW4A16ZerosSm80, "w4a16_g32_asym", 64);
  check_shapes(kGemmW4A16ZerosSm80, "w4a16_g128_asym", 128);
}

TEST(GemmSm80, W4A16WithMinimumsEqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW4A16MinimumsSm80, "int4 with minimums", 64,
               groups_of_32(WeightCode::kInt4, ZeroPoints::kMinimum));
}

TEST(GemmSm80, Mxfp4EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmMxfp4Sm80, "mxfp4", 64);
}

TEST(GemmSm80, W8A16InGroupsEqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmW8A16Sm80, "int8 in groups", 64,
               groups_of_32(WeightCode::kInt8, ZeroPoints::kNone));
}

TEST(GemmSm80, Bf16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmBf16Sm80, "bf16", 64);
}

TEST(GemmSm80, RefusesWhatItCannotDo) {
  const DeviceInfo device{.major = 8, .shared_bytes = size_t{163} << 10};
  const GemmProblem w4a8{.weight = {.code = WeightCode::kInt4, .scale_per = ScalePer::kChannel},
                         .act = ActFormat::kInt8Token,
                         .n = 5,
                         .k = 64};
  EXPECT_TRUE(kGemmW4A8Sm80.accepts(w4a8, device));
  EXPECT_FALSE(kGemmW8A8Int8Sm80.accepts(w4a8, device));
  EXPECT_FALSE(kGemmW4A16Sm80.accepts(w4a8, device));
  EXPECT_FALSE(kGemmBf16Sm80.accepts(w4a8, device));
  GemmProblem zeros{.weight = find_scheme("w4a16_g32_asym")->weight, .n = 5, .k = 64};
  EXPECT_TRUE(kGemmW4A16ZerosSm80.accepts(zeros, device));
  EXPECT_FALSE(kGemmW4A16Sm80.accepts(zeros, device));
  zeros.weight.zero_points = ZeroPoints::kNone;
  EXPECT_FALSE(kGemmW4A16ZerosSm80.accepts(zeros, device));
  GemmProblem minimums{
      .weight = groups_of_32(WeightCode::kInt4, ZeroPoints::kMinimum), .n = 5, .k = 64};
  EXPECT_TRUE(kGemmW4A16MinimumsSm80.accepts(minimums, device));
  EXPECT_FALSE(kGemmW4A16ZerosSm80.accepts(minimums, device));
  EXPECT_FALSE(kGemmW4A16Sm80.accepts(minimums, device));
  minimums.weight.group_size = 128;
  minimums.k = 128;
  EXPECT_FALSE(kGemmW4A16MinimumsSm80.accepts(minimums, device));
  GemmProblem groups{.weight = groups_of_32(WeightCode::kInt8, ZeroPoints::kNone), .n = 5, .k = 64};
  EXPECT_TRUE(kGemmW8A16Sm80.accepts(groups, device));
  groups.weight.scale_dtype = DType::kF32;
  EXPECT_FALSE(kGemmW8A16Sm80.accepts(groups, device));
  GemmProblem w8a16 = w4a8;
  w8a16.weight.code = WeightCode::kInt8;
  w8a16.act = ActFormat::kBf16;
  EXPECT_TRUE(kGemmW8A16Sm80.accepts(w8a16, device));
  EXPECT_FALSE(kGemmW8A8Int8Sm80.accepts(w8a16, device));
  EXPECT_FALSE(kGemmW8A16Sm80.accepts(w4a8, device));
  GemmProblem fp8{
      .weight = find_scheme("w8a8_fp8")->weight, .act = ActFormat::kFp8Token, .n = 5, .k = 64};
  const DeviceInfo hopper{.major = 9, .shared_bytes = size_t{227} << 10};
  EXPECT_TRUE(kGemmW8A8Fp8Sm89.accepts(fp8, hopper));
  EXPECT_FALSE(kGemmW8A8Fp8Sm89.accepts(fp8, device));
  EXPECT_FALSE(kGemmW8A8Int8Sm80.accepts(fp8, hopper));
  EXPECT_FALSE(kGemmW8A8Fp8BlockSm89.accepts(fp8, hopper));
  const GemmProblem blocks{.weight = find_scheme("w8a8_fp8_block")->weight,
                           .act = ActFormat::kFp8Group,
                           .n = 5,
                           .k = 192};
  EXPECT_TRUE(kGemmW8A8Fp8BlockSm89.accepts(blocks, hopper));
  EXPECT_FALSE(kGemmW8A8Fp8BlockSm89.accepts(blocks, device));
  EXPECT_FALSE(kGemmW8A8Fp8Sm89.accepts(blocks, hopper));
  fp8.act = ActFormat::kBf16;
  EXPECT_FALSE(kGemmW8A8Fp8Sm89.accepts(fp8, hopper));
  GemmProblem odd = w4a8;
  odd.k = 96;
  EXPECT_FALSE(kGemmW4A8Sm80.accepts(odd, device));
  odd.k = int64_t{1} << 18;
  EXPECT_FALSE(kGemmW4A8Sm80.accepts(odd, device));
}

}  // namespace
}  // namespace nibble::cuda
