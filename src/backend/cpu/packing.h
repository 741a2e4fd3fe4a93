#pragma once

#include <cstdint>

#include "backend/cpu/kernel_table.h"
#include "base/thread_pool.h"
#include "core/buffer.h"
#include "quant/quant_tensor.h"

namespace nibble::cpu {

/// Owned memory of one packed matrix; PackedWeights describes the layout.
class PackedMatrix final {
 public:
  /// Sizes and allocates the layout of `weight` for activations in `act`, then packs it.
  /// kUnsupported for combinations without a kernel, kCorrupt for NaN codes.
  static Result<PackedMatrix> create(const QuantTensor& weight, ActFormat act, ThreadPool& pool);

  /// Packs other weights of the same format and shape into the same memory.
  Status pack(const QuantTensor& weight, ThreadPool& pool);
  /// The exact inverse of pack().
  [[nodiscard]] Result<QuantTensor> unpack() const;

  [[nodiscard]] PackedWeights view() const;
  [[nodiscard]] const WeightFormat& format() const { return format_; }
  [[nodiscard]] ActFormat act() const { return act_; }
  [[nodiscard]] int64_t n() const { return n_; }
  [[nodiscard]] int64_t k() const { return k_; }
  [[nodiscard]] int64_t tiles() const { return (n_ + kTileRows - 1) / kTileRows; }
  /// Codes, scales and sums, padding included.
  [[nodiscard]] int64_t bytes() const;

 private:
  void pack_tile(const QuantTensor& weight, int64_t tile);
  void unpack_tile(QuantTensor& weight, int64_t tile) const;
  [[nodiscard]] float packed_scale(int64_t index) const;
  [[nodiscard]] int64_t steps() const { return (k_ + kStepColumns - 1) / kStepColumns; }

  WeightFormat format_;
  ActFormat act_ = ActFormat::kFloat;
  int64_t n_ = 0;
  int64_t k_ = 0;
  bool bf16_scales_ = false;
  float scale_factor_ = 1.0F;  // of packed scales over the tensor's
  Buffer codes_;
  Buffer scales_;
  Buffer row_sums_;
};

}  // namespace nibble::cpu
