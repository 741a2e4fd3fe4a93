#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"

#include <array>
#include <utility>
#include <vector>

#include "backend/cuda/forwarding_gemm.h"
#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

/// A kernel that takes one tile at every m.
class OneTile final : public ForwardingGemm {
 public:
  OneTile(std::unique_ptr<GemmKernel> kernel, int tile)
      : ForwardingGemm(std::move(kernel)), tile_(tile) {}
  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override {
    return kernel().workspace_bytes(4096);
  }
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    return dynamic_cast<const GemmSm90&>(kernel()).run_tile(tile_, args, context);
  }

 private:
  int tile_;
};

template <const GemmEntry& kEntry, int kTile>
Result<std::unique_ptr<GemmKernel>> make_one_tile(const GemmProblem& problem,
                                                  const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(auto kernel, kEntry.make(problem, device));
  return std::unique_ptr<GemmKernel>(std::make_unique<OneTile>(std::move(kernel), kTile));
}

template <const GemmEntry& kEntry, size_t... kTiles>
std::vector<GemmEntry> one_tile_entries(std::index_sequence<kTiles...>) {
  return {GemmEntry{.name = kEntry.name,
                    .accepts = kEntry.accepts,
                    .make = make_one_tile<kEntry, static_cast<int>(kTiles)>}...};
}

template <const GemmEntry& kEntry, size_t kTiles>
void check_tiles(std::string_view scheme, double tolerance) {
  const auto entries = one_tile_entries<kEntry>(std::make_index_sequence<kTiles>());
  for (size_t tile = 0; tile < entries.size(); ++tile) {
    SCOPED_TRACE(::testing::Message() << "tile " << tile);
    testing::check_gemm(entries[tile], {.scheme = scheme,
                                        .n = 330,
                                        .k = 832,
                                        .row_counts = {1, 7, 65, 130},
                                        .tolerance = tolerance});
    testing::check_gemm(entries[tile], {.scheme = scheme,
                                        .n = 64,
                                        .k = 4096,
                                        .row_counts = {3, 17},
                                        .tolerance = tolerance,
                                        .seed = 3});
    // Results in whole words; a cluster whose second block has no rows of its own.
    testing::check_gemm(entries[tile], {.scheme = scheme,
                                        .n = 320,
                                        .k = 256,
                                        .row_counts = {31, 300},
                                        .tolerance = tolerance,
                                        .seed = 4});
  }
}

template <const GemmEntry& kEntry>
void check_edges(std::string_view scheme, double tolerance) {
  testing::check_gemm(
      kEntry,
      {.scheme = scheme, .n = 1, .k = 64, .row_counts = {1, 3, 17}, .tolerance = tolerance});
  testing::check_gemm(kEntry, {.scheme = scheme,
                               .n = 67,
                               .k = 192,
                               .row_counts = {1, 8, 9, 33, 64, 129},
                               .tolerance = tolerance,
                               .seed = 2});
  testing::check_gemm(kEntry, {.scheme = scheme,
                               .n = 1344,
                               .k = 1024,
                               .row_counts = {1, 16, 100, 257},
                               .tolerance = tolerance,
                               .seed = 3});
}

TEST(GemmSm90, Int4TimesInt8EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmW4A8Sm90>("w4a8", 1e-6);
}
TEST(GemmSm90, Int4TimesInt8InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmW4A8Sm90, 7>("w4a8", 1e-6);
}
TEST(GemmSm90, Int4InLevelsTimesInt8EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmW4A8LevelsSm90>("w4a8_g64", 1e-6);
  testing::check_gemm(
      kGemmW4A8LevelsSm90,
      {.scheme = "w4a8_g128", .n = 67, .k = 384, .row_counts = {1, 3, 17, 65}, .tolerance = 1e-6});
}
TEST(GemmSm90, Int4InLevelsTimesInt8InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmW4A8LevelsSm90, 7>("w4a8_g64", 1e-6);
}
TEST(GemmSm90, Int8TimesInt8EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmW8A8Int8Sm90>("w8a8_int8", 1e-6);
}
TEST(GemmSm90, Int8TimesInt8InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmW8A8Int8Sm90, 8>("w8a8_int8", 1e-6);
}
// The tensor cores keep about 14 bits of a running sum, cut and not rounded at each of k / 32
// steps.
TEST(GemmSm90, E4M3TimesE4M3EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmW8A8Fp8Sm90>("w8a8_fp8", 4e-3);
}
TEST(GemmSm90, E4M3TimesE4M3InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmW8A8Fp8Sm90, 8>("w8a8_fp8", 1e-2);
}

TEST(GemmSm90, Int8TimesBf16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmW8A16Sm90>("w8a16_channel", 1e-4);
}
TEST(GemmSm90, Int8TimesBf16InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmW8A16Sm90, 8>("w8a16_channel", 1e-4);
}
TEST(GemmSm90, Int4TimesBf16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmW4A16ChannelSm90>("w4a16_channel", 1e-4);
}
TEST(GemmSm90, Int4TimesBf16InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmW4A16ChannelSm90, 7>("w4a16_channel", 1e-4);
}
TEST(GemmSm90, Bf16TimesBf16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmBf16Sm90>("bf16", 1e-4);
}
TEST(GemmSm90, Bf16TimesBf16InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmBf16Sm90, 8>("bf16", 1e-4);
}

TEST(GemmSm90, Mxfp4TimesE4M3EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_edges<kGemmMxfp4Fp8Sm90>("mxfp4_fp8", 4e-3);
}
TEST(GemmSm90, Mxfp4TimesE4M3InEveryTile) {
  NIBBLE_NEEDS_GPU();
  check_tiles<kGemmMxfp4Fp8Sm90, 8>("mxfp4_fp8", 1e-2);
}

TEST(GemmSm90, RefusesWhatItCannotMultiply) {
  const DeviceInfo hopper{.major = 9};
  const WeightFormat int4{.code = WeightCode::kInt4, .scale_per = ScalePer::kChannel};
  GemmProblem problem{.weight = int4, .act = ActFormat::kInt8Token, .n = 5, .k = 128};
  EXPECT_TRUE(kGemmW4A8Sm90.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW4A8Sm90.accepts(problem, DeviceInfo{.major = 8}));
  EXPECT_FALSE(kGemmW8A8Int8Sm90.accepts(problem, hopper));
  GemmProblem w8a16{.weight = {.code = WeightCode::kInt8, .scale_per = ScalePer::kChannel},
                    .act = ActFormat::kBf16,
                    .n = 5,
                    .k = 64};
  EXPECT_TRUE(kGemmW8A16Sm90.accepts(w8a16, hopper));
  EXPECT_FALSE(kGemmW8A16Sm90.accepts(problem, hopper));
  EXPECT_FALSE(kGemmW8A8Int8Sm90.accepts(w8a16, hopper));
  problem.k = 96;
  EXPECT_FALSE(kGemmW4A8Sm90.accepts(problem, hopper));
  GemmProblem bf16{.weight = find_scheme("bf16")->weight, .n = 6144, .k = 4096};
  EXPECT_TRUE(kGemmBf16Sm90.accepts(bf16, hopper));
  bf16.n = 14336;
  EXPECT_TRUE(kGemmBf16Sm90.accepts(bf16, hopper));
  bf16.k = 8192;  // cuBLASLt is quicker with many rows
  EXPECT_FALSE(kGemmBf16Sm90.accepts(bf16, hopper));
  bf16.n = 4096;
  bf16.k = 14336;  // and of such long ones with few
  EXPECT_FALSE(kGemmBf16Sm90.accepts(bf16, hopper));
  bf16.experts = 4;
  EXPECT_TRUE(kGemmBf16Sm90.accepts(bf16, hopper));
  bf16 = {.weight = bf16.weight, .n = 49152, .k = 64};  // may be the embeddings
  EXPECT_FALSE(kGemmBf16Sm90.accepts(bf16, hopper));
  GemmProblem fp4{
      .weight = find_scheme("mxfp4_fp8")->weight, .act = ActFormat::kFp8Token, .n = 5, .k = 64};
  EXPECT_TRUE(kGemmMxfp4Fp8Sm90.accepts(fp4, hopper));
  EXPECT_FALSE(kGemmMxfp4Fp8Sm90.accepts(fp4, DeviceInfo{.major = 8, .minor = 9}));
  EXPECT_FALSE(kGemmW8A8Fp8Sm90.accepts(fp4, hopper));
  fp4.act = ActFormat::kBf16;
  EXPECT_FALSE(kGemmMxfp4Fp8Sm90.accepts(fp4, hopper));
  problem.k = 1 << 20;  // sums would overflow
  EXPECT_FALSE(kGemmW4A8Sm90.accepts(problem, hopper));
}

/// Every step of every tile is taken once, and block_of names the block that takes it.
void check_schedule(const GemmSchedule& schedule) {
  const int tiles = schedule.row_tiles * schedule.token_tiles;
  std::vector<std::vector<int>> taken(static_cast<size_t>(tiles),
                                      std::vector<int>(static_cast<size_t>(schedule.steps), -1));
  for (int block = 0; block < schedule.blocks; ++block) {
    GemmParts parts(schedule, block);
    GemmPart part;
    int split_parts = 0;
    while (parts.next(part)) {
      ASSERT_LT(part.begin, part.end);
      const int tile = part.row_tile * schedule.token_tiles + part.token_tile;
      ASSERT_TRUE(tile >= 0 && tile < tiles);
      for (int step = part.begin; step < part.end; ++step) {
        int& owner = taken[static_cast<size_t>(tile)][static_cast<size_t>(step)];
        ASSERT_EQ(owner, -1);
        owner = block;
        if (part.split >= 0) {
          ASSERT_EQ(schedule.block_of(part.split * schedule.steps + step), block);
        }
      }
      const bool shared = part.split >= 0 && part.end - part.begin < schedule.steps;
      split_parts += shared ? 1 : 0;
    }
    ASSERT_LE(split_parts, 2);  // what the workspace has room for
  }
  for (const auto& steps : taken) {
    for (const int owner : steps) {
      ASSERT_GE(owner, 0);
    }
  }
}

TEST(GemmSm90, SchedulesTakeEveryStepOnce) {
  for (const auto& [rows, tokens, steps] : std::vector<std::array<int, 3>>{{1, 1, 1},
                                                                           {1, 1, 7},
                                                                           {32, 1, 56},
                                                                           {224, 1, 32},
                                                                           {3, 5, 4},
                                                                           {112, 32, 4},
                                                                           {16, 1, 112},
                                                                           {133, 1, 5},
                                                                           {131, 1, 9},
                                                                           {66, 2, 8},
                                                                           {1, 40, 3},
                                                                           {7, 37, 11}}) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << tokens << " x " << steps);
    const GemmSchedule schedule = make_runs_schedule(rows, tokens, steps, 132);
    EXPECT_LE(schedule.blocks, 132);
    check_schedule(schedule);
  }
  for (const auto& [rows, tokens, parts] : std::vector<std::array<int, 3>>{
           {1, 1, 1}, {1, 1, 9}, {32, 1, 4}, {33, 2, 2}, {112, 1, 1}, {66, 2, 1}, {224, 3, 1}}) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << tokens << " in " << parts);
    check_schedule(make_parts_schedule(rows, tokens, 11, 132, parts));
  }
  for (const int cluster : {2, 3, 4}) {
    check_schedule(make_cluster_schedule(5, 3, 11, cluster));
  }
  EXPECT_EQ(make_runs_schedule(32, 1, 56, 132).split_blocks, 132);
  EXPECT_EQ(make_runs_schedule(132, 2, 64, 132).split_tiles, 0);
}

}  // namespace
}  // namespace nibble::cuda
