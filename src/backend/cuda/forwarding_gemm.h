#pragma once

#include <memory>
#include <utility>

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// Another kernel's weights and workspace; what it runs is up to the classes derived.
class ForwardingGemm : public GemmKernel {
 public:
  explicit ForwardingGemm(std::unique_ptr<GemmKernel> kernel) : kernel_(std::move(kernel)) {}
  [[nodiscard]] size_t packed_bytes() const override { return kernel_->packed_bytes(); }
  [[nodiscard]] bool packs_nothing() const override { return kernel_->packs_nothing(); }
  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override {
    return kernel_->pack(codes, scales, packed, stream);
  }
  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override {
    return kernel_->unpack(packed, codes, scales, stream);
  }
  [[nodiscard]] size_t workspace_bytes(int64_t max_m) const override {
    return kernel_->workspace_bytes(max_m);
  }
  [[nodiscard]] int choose(int64_t m) const override { return kernel_->choose(m); }

 protected:
  [[nodiscard]] const GemmKernel& kernel() const { return *kernel_; }

 private:
  std::unique_ptr<GemmKernel> kernel_;
};

}  // namespace nibble::cuda
