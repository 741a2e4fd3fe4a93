#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/uploader.h"

namespace nibble::cuda {

/// What products need of their backend; outlives them.
struct GemmContext {
  const DeviceInfo& device;
  cudaStream_t stream = nullptr;
  GemmScratch& scratch;
  Uploader& uploader;
};

/// One packed matrix on the GPU: rows are normed, multiplied or rounded by one kernel, then
/// multiplied by another.
class CudaGemm final : public PreparedGemm {
 public:
  /// The format in which the GPU keeps weights of `format`: F16 and F32, of unquantized weights
  /// and of scales and minimums of groups, become BF16, and a scale of the matrix one for each
  /// channel.
  static WeightFormat device_format(WeightFormat format);
  static Result<std::unique_ptr<CudaGemm>> create(std::span<const QuantView> parts,
                                                  const GemmEntry& entry,
                                                  const GemmProblem& problem,
                                                  int64_t max_m,
                                                  const GemmContext& context);

  void round_rows(const GemmArgs& args) override;
  void multiply(const GemmArgs& args) override;
  [[nodiscard]] bool reads_rows_of(const PreparedGemm& other, int64_t m) const override;
  /// run() that reports what a launch says: errors of kernels before it, too.
  Status launch(const GemmArgs& args);
  /// For each kernel that run() takes for up to `most` rows, the least number of rows, nearly.
  [[nodiscard]] std::vector<int64_t> row_counts(int64_t most) const;
  [[nodiscard]] Result<QuantTensor> unpack() const override;
  Status update(int64_t first_row, const QuantTensor& rows) override;
  [[nodiscard]] std::string_view kernel_name() const override { return name_; }
  [[nodiscard]] int64_t weight_bytes() const override {
    return static_cast<int64_t>(packed_->size());
  }
  /// Where the weights lie as the kernel reads them, and the kernel.
  [[nodiscard]] const void* packed() const { return packed_->as<void>(); }
  [[nodiscard]] const GemmKernel& kernel() const { return *kernel_; }
  /// The matrix [n, k] in its canonical codes, where that is what the kernel reads, or none.
  [[nodiscard]] std::shared_ptr<const DeviceBuffer> codes() const {
    return kernel_->packs_nothing() ? packed_ : nullptr;
  }

 private:
  CudaGemm(const GemmProblem& problem, const GemmContext& context, int64_t max_m)
      : problem_(problem), context_(context), max_m_(max_m) {}

  /// Brings the rows of `parts` to the GPU and packs them over the rows from first_row on. Waits:
  /// products read their weights before the kernel in front of them has ended.
  Status load(int64_t first_row, std::span<const QuantView> parts);
  Status upload_codes(std::span<const QuantView> parts, std::byte* to);
  /// Scales or minimums.
  using ReadNumbers = void (QuantView::*)(int64_t first, std::span<float> out) const;
  Status upload_numbers(std::span<const QuantView> parts, ReadNumbers read, float* to);
  Status upload_zeros(std::span<const QuantView> parts, float* to);
  /// Whether the product reads args.x as it is.
  [[nodiscard]] bool takes_rows_as_given(const GemmArgs& args) const;
  Status launch_rounding(const GemmArgs& args) const;
  Status launch_product(const GemmArgs& args) const;

  GemmProblem problem_;
  GemmContext context_;
  int64_t max_m_ = 0;
  std::string name_;
  std::unique_ptr<GemmKernel> kernel_;
  std::shared_ptr<DeviceBuffer> packed_;
};

}  // namespace nibble::cuda
