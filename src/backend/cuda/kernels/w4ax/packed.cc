#include "backend/cuda/kernels/w4ax/packed.h"

#include <cuda_runtime.h>

#include "backend/cuda/int_blocks.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

/// Sums stay within an int32: 16 * 8 * 127 times k.
constexpr int64_t kMostK = 131008;

}  // namespace

W4AxCount w4ax_count(int64_t n, int64_t k) {
  return {.row_pieces = static_cast<int>(ceil_div(n, 32)),
          .k_blocks = static_cast<int>(int_k_blocks(k))};
}

bool is_w4ax(const GemmProblem& problem) {
  const WeightFormat& weight = problem.weight;
  return problem.act == ActFormat::kIntBlocks && weight.code == WeightCode::kInt4 &&
         weight.zero_points == ZeroPoints::kNone && weight.scale_per == ScalePer::kGroup &&
         is_block_size(weight.group_size) && problem.n >= 1 && problem.k >= 32 &&
         problem.k % 32 == 0 && problem.k <= kMostK;
}

W4AxPacked::W4AxPacked(const GemmProblem& problem)
    : pieces_(w4ax_pieces_of(problem.weight)),
      n_(problem.n),
      k_(problem.k),
      block_(problem.weight.group_size),
      count_(w4ax_count(problem.n, problem.k)) {}

size_t W4AxPacked::piece_bytes() const {
  return static_cast<size_t>(count_.row_pieces) * static_cast<size_t>(count_.k_blocks) *
         static_cast<size_t>(pieces_.piece_bytes);
}

cudaError_t W4AxPacked::pack(const void* codes,
                             const float* scales,
                             void* packed,
                             cudaStream_t stream) const {
  return pieces_.pack(codes, scales, n_, k_, packed, stream);
}

cudaError_t W4AxPacked::unpack(const void* packed,
                               void* codes,
                               float* scales,
                               cudaStream_t stream) const {
  return pieces_.unpack(packed, n_, k_, codes, scales, stream);
}

bool W4AxPacked::takes(const GemmLaunch& args) const {
  return args.blocks != nullptr && args.blocks->block == block_ &&
         args.blocks->scales == BlockScales::kEach;
}

}  // namespace nibble::cuda
