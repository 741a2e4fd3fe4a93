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
         weight.zero_points == ZeroPoints::kNone &&
         (weight.scale_per == ScalePer::kChannel ||
          (weight.scale_per == ScalePer::kGroup && is_block_size(weight.group_size))) &&
         problem.n >= 1 && problem.k >= 32 && problem.k % 32 == 0 && problem.k <= kMostK;
}

W4AxPacked::W4AxPacked(const GemmProblem& problem)
    : pieces_(w4ax_pieces_of(problem.weight)),
      n_(problem.n),
      k_(problem.k),
      block_(problem.weight.grouped() ? problem.weight.group_size : 0),
      count_(w4ax_count(problem.n, problem.k)) {}

size_t W4AxPacked::piece_bytes() const {
  return static_cast<size_t>(count_.row_pieces) * static_cast<size_t>(count_.k_blocks) *
         static_cast<size_t>(pieces_.piece_bytes);
}

size_t W4AxPacked::packed_bytes() const {
  // Two rows' scales are read at once.
  const size_t scales = by_class() ? round_up(static_cast<size_t>(n_), size_t{64}) : 0;
  return piece_bytes() + scales * sizeof(float);
}

cudaError_t W4AxPacked::pack(const void* codes,
                             const float* scales,
                             void* packed,
                             cudaStream_t stream) const {
  if (const cudaError_t error = pieces_.pack(codes, scales, n_, k_, packed, stream);
      error != cudaSuccess || !by_class()) {
    return error;
  }
  auto* end = static_cast<uint8_t*>(packed) + piece_bytes();
  const size_t bytes = static_cast<size_t>(n_) * sizeof(float);
  if (const cudaError_t error =
          cudaMemsetAsync(end + bytes, 0, packed_bytes() - piece_bytes() - bytes, stream);
      error != cudaSuccess) {
    return error;
  }
  return cudaMemcpyAsync(end, scales, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t W4AxPacked::unpack(const void* packed,
                               void* codes,
                               float* scales,
                               cudaStream_t stream) const {
  if (const cudaError_t error = pieces_.unpack(packed, n_, k_, codes, scales, stream);
      error != cudaSuccess || !by_class()) {
    return error;
  }
  return cudaMemcpyAsync(scales, static_cast<const uint8_t*>(packed) + piece_bytes(),
                         static_cast<size_t>(n_) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

bool W4AxPacked::takes(const GemmLaunch& args) const {
  return args.blocks != nullptr &&
         (by_class() ? args.blocks->scales == BlockScales::kClass
                     : args.blocks->block == block_ && args.blocks->scales == BlockScales::kEach);
}

}  // namespace nibble::cuda
