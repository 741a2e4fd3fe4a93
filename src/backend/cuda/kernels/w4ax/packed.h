#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// Where the weights of products with 4- and 8-bit blocks lie, one layout for all GPUs
/// (w4ax/piece.cuh).
struct W4AxPieces {
  int piece_bytes = 0;
  /// codes [n, k] canonical, and group scales [n, groups], to pieces or back.
  cudaError_t (*pack)(const void* codes,
                      const float* scales,
                      int64_t n,
                      int64_t k,
                      void* pieces,
                      cudaStream_t) = nullptr;
  cudaError_t (*unpack)(
      const void* pieces, int64_t n, int64_t k, void* codes, float* scales, cudaStream_t) = nullptr;
};

/// Pieces of 32 rows and of 128 of K.
struct W4AxCount {
  int row_pieces = 0, k_blocks = 0;
};
[[nodiscard]] W4AxCount w4ax_count(int64_t n, int64_t k);

/// What the kernels of all GPUs share.
class W4AxPacked : public GemmKernel {
 public:
  explicit W4AxPacked(const GemmProblem& problem);
  [[nodiscard]] size_t packed_bytes() const override { return piece_bytes(); }
  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override;
  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override;

 protected:
  [[nodiscard]] int64_t n() const { return n_; }
  [[nodiscard]] int64_t k() const { return k_; }
  [[nodiscard]] const W4AxCount& count() const { return count_; }
  [[nodiscard]] const W4AxPieces& pieces() const { return pieces_; }
  [[nodiscard]] size_t piece_bytes() const;
  /// Whether the rows of a product are what these weights take.
  [[nodiscard]] bool takes(const GemmLaunch& args) const;

 private:
  const W4AxPieces& pieces_;
  int64_t n_, k_;
  int block_;  // of the weights' scales
  W4AxCount count_;
};

/// Those of weights in this format.
[[nodiscard]] const W4AxPieces& w4ax_pieces_of(const WeightFormat& weight);

/// Whether weights and rows have the form, on any device.
[[nodiscard]] bool is_w4ax(const GemmProblem& problem);

}  // namespace nibble::cuda
