#pragma once

#include "backend/backend.h"
#include "backend/cpu/packed_product.h"

namespace nibble::cpu {

/// One packed matrix and the kernels that multiply with it.
class CpuGemm final : public PreparedGemm {
 public:
  /// `product` must accept the request's problem. kCorrupt for NaN codes, kResourceExhausted.
  static Result<std::unique_ptr<PreparedGemm>> create(const GemmRequest& request,
                                                      const TiledProduct& product,
                                                      const GemmDevice& device);

  void round_rows(const GemmArgs& args) override;
  void multiply(const GemmArgs& args) override;
  [[nodiscard]] bool reads_rows_of(const PreparedGemm& other, int64_t m) const override;
  [[nodiscard]] Result<QuantTensor> unpack() const override { return matrix_.unpack(); }
  Status update(int64_t first_row, const QuantTensor& rows) override;
  [[nodiscard]] std::string_view kernel_name() const override { return product_.name(); }
  [[nodiscard]] int64_t weight_bytes() const override { return matrix_.bytes(); }

 private:
  CpuGemm(PackedMatrix matrix,
          const GemmRequest& request,
          const TiledProduct& product,
          const GemmDevice& device);

  [[nodiscard]] RoundedRows rounded_rows(int64_t m) const;
  [[nodiscard]] PackedProduct::Task whole_task(const GemmArgs& args) const;
  void multiply_rows(const GemmArgs& args);
  void multiply_tiles(const GemmArgs& args);

  PackedMatrix matrix_;
  PackedProduct product_;
  Workspace& workspace_;
  int64_t max_m_ = 0;
};

}  // namespace nibble::cpu
