#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/uploader.h"
#include "backend/cuda/weight_stream.h"
#include "quant/quant_view.h"

namespace nibble::cuda {

class StepBranch;

/// Rows of the step that is run.
struct StepRows {
  /// On the GPU, how many there are: a recorded step may have been made for more, which belong to
  /// no sequence. Null: all.
  const int32_t* there = nullptr;
};

/// What products need of their backend; outlives them.
struct GemmContext {
  const DeviceInfo& device;
  cudaStream_t stream = nullptr;
  GemmScratch& scratch;
  Uploader& uploader;
  StepBranch* branch = nullptr;  // of steps; null: they have none
  const StepRows* rows = nullptr;
};

/// What a product of up to max_m rows keeps of its rows.
[[nodiscard]] GemmScratch::Rows scratch_rows(const GemmProblem& problem, int64_t max_m);

/// Matrices of one form in GPU memory as one kernel reads them, the same number of bytes apart: the
/// one of a dense product, or those of all experts of a layer.
class PackedMatrices final {
 public:
  struct Product {
    const GemmEntry& entry;
    const GemmProblem& problem;  // of each matrix, in the form that the GPU keeps it in
    int64_t max_m = 0;
    int64_t count = 1;
  };

  /// Every matrix is as many of `parts` as the others, one below the other. Returns while the last
  /// ones are on their way: who lets products run waits for the stream first, as they may read
  /// their weights before the kernel in front of them has ended. kResourceExhausted.
  static Result<std::shared_ptr<PackedMatrices>> create(std::span<const QuantView> parts,
                                                        const Product& product,
                                                        const GemmContext& context);

  /// PreparedGemm::update() and unpack() of one of the matrices; these wait.
  Status update(int64_t index, int64_t first_row, const QuantTensor& rows);
  [[nodiscard]] Result<QuantTensor> unpack(int64_t index) const;

  [[nodiscard]] const GemmKernel& kernel() const { return *kernel_; }
  [[nodiscard]] const GemmProblem& problem() const { return problem_; }
  [[nodiscard]] std::string_view kernel_name() const { return name_; }
  [[nodiscard]] const DeviceBuffer& memory() const { return memory_; }
  [[nodiscard]] const void* at(int64_t index) const { return place_of(index); }
  /// Of one matrix, and from one to the next.
  [[nodiscard]] int64_t matrix_bytes() const {
    return static_cast<int64_t>(kernel_->packed_bytes());
  }
  [[nodiscard]] int64_t stride() const { return stride_; }

 private:
  PackedMatrices(const Product& product, const GemmContext& context);

  [[nodiscard]] std::byte* place_of(int64_t index) const {
    return memory_.as<std::byte>() + index * stride_;
  }
  /// Of one matrix's canonical codes and numbers on their way.
  [[nodiscard]] size_t staged_code_bytes() const;
  [[nodiscard]] size_t staged_number_bytes() const;
  /// The errors of check_levels(), where products need levels.
  [[nodiscard]] Status check_numbers(const QuantView& part) const;
  [[nodiscard]] Status load(std::span<const QuantView> parts);
  /// Packs matrices from `first` on, which `parts` make up.
  [[nodiscard]] Status load_staged(int64_t first, int64_t count, std::span<const QuantView> parts);
  [[nodiscard]] Status send(const WeightStream& stream, void* to) const;

  GemmProblem problem_;
  GemmContext context_;
  std::string name_;
  int64_t count_ = 1;
  std::unique_ptr<GemmKernel> kernel_;
  DeviceBuffer memory_;
  int64_t stride_ = 0;
};

}  // namespace nibble::cuda
