#pragma once

#include <string>

#include "backend/backend.h"
#include "backend/cpu/packing.h"

namespace nibble::cpu {

/// One packed matrix and the kernel that multiplies with it.
class CpuGemm final : public PreparedGemm {
 public:
  /// Both references must outlive the object.
  static Result<std::unique_ptr<PreparedGemm>> create(std::span<const QuantView> parts,
                                                      ActFormat act,
                                                      int64_t max_m,
                                                      const KernelTable& kernels,
                                                      BufferArena& arena,
                                                      ThreadPool& pool);

  void run(const GemmArgs& args) override;
  [[nodiscard]] Result<QuantTensor> unpack() const override { return matrix_.unpack(); }
  Status update(const QuantTensor& weight) override;
  [[nodiscard]] std::string_view kernel_name() const override { return name_; }
  [[nodiscard]] int64_t weight_bytes() const override { return matrix_.bytes(); }

 private:
  CpuGemm(PackedMatrix matrix, const KernelTable& kernels, ThreadPool& pool);

  Status allocate_workspace(int64_t max_m);
  void round_activations(const GemmArgs& args);

  PackedMatrix matrix_;
  const KernelTable& kernels_;
  ThreadPool& pool_;
  KernelTable::Gemm kernel_ = nullptr;
  std::string name_;
  int64_t max_m_ = 0;
  int64_t padded_k_ = 0;  // row length of quantized activations
  Buffer activations_;    // int8 codes, or f32 values of fp8 codes
  Buffer act_scales_;
  Buffer act_sums_;
};

}  // namespace nibble::cpu
