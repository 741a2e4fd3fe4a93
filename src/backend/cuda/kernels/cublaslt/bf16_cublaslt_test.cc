#include "backend/cuda/kernels/cublaslt/bf16_cublaslt.h"

#include "backend/cuda/cublaslt.h"
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
