#pragma once

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device_blocks.h"
#include "backend/cuda/input_rounding.h"
#include "backend/cuda/packed_matrices.h"

namespace nibble::cuda {

/// One packed matrix on the GPU: rows are normed, multiplied or rounded by one kernel, then
/// multiplied by another.
class CudaGemm final : public PreparedGemm {
 public:
  /// The first of `packed`. `max_m` is the most rows of a product. blocks: of rows in blocks.
  CudaGemm(std::shared_ptr<PackedMatrices> packed,
           int64_t max_m,
           const GemmContext& context,
           std::shared_ptr<const DeviceBlocks> blocks = nullptr)
      : problem_(packed->problem()),
        context_(context),
        max_m_(max_m),
        packed_(std::move(packed)),
        blocks_(std::move(blocks)) {}

  void round_rows(const GemmArgs& args) override;
  void multiply(const GemmArgs& args) override;
  [[nodiscard]] bool reads_rows_of(const PreparedGemm& other, int64_t m) const override;
  /// run() that reports what a launch says: errors of kernels before it, too.
  Status launch(const GemmArgs& args);
  /// For each kernel that run() takes for up to `most` rows, the least number of rows, nearly.
  [[nodiscard]] std::vector<int64_t> row_counts(int64_t most) const;
  [[nodiscard]] Result<QuantTensor> unpack() const override { return packed_->unpack(0); }
  Status prepare_branch() override;
  Status update(int64_t first_row, const QuantTensor& rows) override {
    return packed_->update(0, first_row, rows);
  }
  [[nodiscard]] std::string_view kernel_name() const override { return packed_->kernel_name(); }
  [[nodiscard]] int64_t weight_bytes() const override { return packed_->matrix_bytes(); }
  /// The matrix [n, k] in its canonical codes, where that is what the kernel reads, or none.
  [[nodiscard]] std::shared_ptr<const DeviceBuffer> codes() const {
    return packed_->kernel().packs_nothing()
               ? std::shared_ptr<const DeviceBuffer>(packed_, &packed_->memory())
               : nullptr;
  }

 private:
  /// Whether it is issued in a branch of a step; then with that one's memory, on its stream.
  [[nodiscard]] bool in_branch() const;
  [[nodiscard]] const GemmScratch& scratch() const;
  /// How its next kernel is launched.
  [[nodiscard]] LaunchContext next() const;
  [[nodiscard]] InputRounding rounding_of(const GemmArgs& args) const;
  Status launch_rounding(const GemmArgs& args) const;
  Status launch_product(const GemmArgs& args) const;

  GemmProblem problem_;
  GemmContext context_;
  int64_t max_m_ = 0;
  bool branch_prepared_ = false;
  std::shared_ptr<PackedMatrices> packed_;
  std::shared_ptr<const DeviceBlocks> blocks_;
};

}  // namespace nibble::cuda
