#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/cuda/testing/gemm_check.h"
#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

// Rows at the edges of blocks of channels, k of one group, short of the ring and odd, every token
// tile and tiles that are not full.
void check_shapes(const GemmEntry& entry,
                  std::string_view scheme,
                  int64_t group,
                  double tolerance) {
  testing::GemmCheck check{.scheme = scheme, .tolerance = tolerance};
  const auto run = [&](int64_t n, int64_t k, std::vector<int64_t> row_counts) {
    check.n = n;
    check.k = k;
    check.row_counts = std::move(row_counts);
    testing::check_gemm(entry, check);
    ++check.seed;
  };
  const int64_t least = std::max<int64_t>(group, 64);
  run(8, least, {1, 8, 9});
  run(130, 5 * least, {3, 17, 33, 64, 65});
  run(257, 1024 + least, {1, 16, 31, 97, 128, 129, 160, 161, 193, 300});
}

constexpr double kRounded = 3e-3;  // scaled codes are rounded to BF16, MXFP4 is exact

TEST(ExpertsSm90, Mxfp4EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kGemmMxfp4Sm90, "mxfp4", 32, 1e-5);
}

TEST(ExpertsSm90, W4A16EqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  check_shapes(kExpertsW4A16Sm90, "w4a16_g32", 32, kRounded);
  check_shapes(kExpertsW4A16Sm90, "w4a16_g128", 128, kRounded);
}

}  // namespace
}  // namespace nibble::cuda
