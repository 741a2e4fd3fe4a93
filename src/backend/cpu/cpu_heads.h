#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/cpu/packed_product.h"
#include "backend/prepared_heads.h"

namespace nibble::cpu {

/// The matrices of all heads of a layer, multiplied at once: threads share the tiles of all of
/// them, each for the rows of its head.
class CpuHeads final : public PreparedHeads {
 public:
  struct Request {
    std::span<const QuantView> heads;  // of one format and shape
    const ActSpec& act;
    int64_t max_m = 0;
  };

  /// `product` must accept the heads. kCorrupt for NaN codes, kResourceExhausted.
  static Result<std::unique_ptr<PreparedHeads>> create(const Request& request,
                                                       const TiledProduct& product,
                                                       const GemmDevice& device);
  /// Bytes that rounded rows of heads with up to k columns take of the workspace.
  [[nodiscard]] static int64_t workspace_bytes(int64_t heads, int64_t k, int64_t max_m);

  void run(const HeadsArgs& args) override;
  [[nodiscard]] int64_t weight_bytes() const override;

 private:
  CpuHeads(std::vector<PackedMatrix> matrices,
           const Request& request,
           const TiledProduct& product,
           const GemmDevice& device);

  [[nodiscard]] RoundedRows rounded_rows(int64_t head, int64_t m) const;
  void round_rows(const HeadsArgs& args);
  void multiply(const HeadsArgs& args);
  [[nodiscard]] PackedProduct::Task head_task(const HeadsArgs& args, int64_t head) const;

  std::vector<PackedMatrix> matrices_;
  PackedProduct product_;
  Workspace& workspace_;
  int64_t rows_ = 0;  // of each head that are multiplied at a time
};

}  // namespace nibble::cpu
