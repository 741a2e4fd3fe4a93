#include "backend/cuda/kernels/cublaslt/bf16_cublaslt.h"

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/kernels/cublaslt/experts_cublaslt.h"
#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

TEST(GemmBf16CublasLt, EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  testing::check_gemm(kGemmBf16CublasLt,
                      {.scheme = "bf16", .n = 192, .k = 320, .row_counts = {1, 3, 17, 130}});
  testing::check_gemm(kGemmBf16CublasLt,
                      {.scheme = "bf16", .n = 8, .k = 8, .row_counts = {1, 5}, .seed = 2});
}

TEST(GemmBf16CublasLt, RefusesOtherWeights) {
  const DeviceInfo device{.major = 9};
  EXPECT_FALSE(kGemmBf16CublasLt.accepts(
      {.weight = {.code = WeightCode::kInt8, .scale_per = ScalePer::kChannel}, .n = 64, .k = 64},
      device));
  EXPECT_FALSE(kGemmBf16CublasLt.accepts({.n = 64, .k = 60}, device));
  EXPECT_TRUE(kGemmBf16CublasLt.accepts({.n = 64, .k = 64}, device));
}

TEST(ExpertsCublasLt, TakeExpertsAlone) {
  const DeviceInfo device{.major = 9};
  const WeightFormat fp8{WeightCode::kFp8E4M3, ScalePer::kChannel, 0, DType::kF32};
  for (const GemmEntry& entry :
       {kExpertsCublasLtRebuilt, kExpertsCublasLtCached, kExpertsCublasLtStrided}) {
    EXPECT_TRUE(entry.grouped && entry.only_asked);
    EXPECT_TRUE(entry.accepts({.n = 64, .k = 72, .experts = 2}, device));
    EXPECT_FALSE(entry.accepts({.n = 64, .k = 72}, device)) << "a dense product";
    EXPECT_FALSE(entry.accepts({.n = 64, .k = 68, .experts = 2}, device)) << "8 bytes off";
    EXPECT_TRUE(entry.accepts({fp8, ActFormat::kFp8Token, 64, 80, WeightRows::kPlain, 2}, device));
    EXPECT_FALSE(entry.accepts({fp8, ActFormat::kFp8Token, 64, 72, WeightRows::kPlain, 2}, device));
    EXPECT_FALSE(entry.accepts({fp8, ActFormat::kBf16, 64, 80, WeightRows::kPlain, 2}, device));
  }
}

TEST(CublasLt, NamesTheMissingLibrary) {
  const auto api = CublasLtApi::open("libnibble_no_such_library.so");
  ASSERT_FALSE(api.ok());
  EXPECT_EQ(api.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(api.status().message().find("libnibble_no_such_library.so"), std::string::npos);
  EXPECT_NE(api.status().message().find("LD_LIBRARY_PATH"), std::string::npos);
}

TEST(CublasLt, BucketsArePowersOfTwo) {
  EXPECT_EQ(cublaslt_bucket(1), 1);
  EXPECT_EQ(cublaslt_bucket(5), 8);
  EXPECT_EQ(cublaslt_bucket(128), 128);
  EXPECT_EQ(cublaslt_bucket(100000), 8192);
}

}  // namespace
}  // namespace nibble::cuda
