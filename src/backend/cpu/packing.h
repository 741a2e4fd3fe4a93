#pragma once

#include <cstdint>
#include <span>

#include "backend/cpu/kernel_table.h"
#include "base/thread_pool.h"
#include "core/buffer.h"
#include "quant/quant_view.h"

namespace nibble::cpu {

/// kUnsupported, with the reason and a remedy, for what PackedMatrix does not take.
[[nodiscard]] Status check_formats(const WeightFormat& format, ActFormat act, int64_t k);

/// Owned memory of one packed matrix; PackedWeights describes the layout.
class PackedMatrix final {
 public:
  using Parts = std::span<const QuantView>;

  /// Sizes and allocates the layout of the parts' rows below each other, for activations in `act`,
  /// then packs them; each thread packs the tiles that it will multiply with. The parts have one
  /// format and one k. kUnsupported for combinations without a kernel, kCorrupt for NaN codes.
  static Result<PackedMatrix> create(Parts parts,
                                     ActFormat act,
                                     BufferArena& arena,
                                     ThreadPool& pool);

  /// Packs other weights of the same format and shape into the same memory; leaves it as it is when
  /// they cannot be used.
  Status update(const QuantView& weight, ThreadPool& pool);
  /// The exact inverse of pack().
  [[nodiscard]] Result<QuantTensor> unpack() const;

  [[nodiscard]] PackedWeights view() const;
  [[nodiscard]] const WeightFormat& format() const { return format_; }
  [[nodiscard]] ActFormat act() const { return act_; }
  [[nodiscard]] int64_t n() const { return n_; }
  [[nodiscard]] int64_t k() const { return k_; }
  [[nodiscard]] int64_t tiles() const { return (n_ + kTileRows - 1) / kTileRows; }
  /// Codes, scales, zero points and sums, padding included.
  [[nodiscard]] int64_t bytes() const;

 private:
  // A row of the matrix: which part it comes from, and where in it.
  struct RowSource {
    const QuantView* part = nullptr;  // null: a row past n
    int64_t row = 0;
  };

  /// False when a tile's codes are not numbers; the tile is packed nevertheless.
  bool pack_tile(Parts parts, int64_t tile);
  Status pack(Parts parts, ThreadPool& pool);
  void pack_scales(std::span<const RowSource> rows, int64_t tile);
  void pack_zeros(std::span<const RowSource> rows, int64_t tile);
  [[nodiscard]] bool is_valid(const RowSource& row) const;
  void unpack_tile(QuantTensor& weight, int64_t tile) const;
  [[nodiscard]] float packed_scale(int64_t index) const;
  [[nodiscard]] int64_t steps() const { return (k_ + kStepColumns - 1) / kStepColumns; }
  /// Steps of a tile in memory: whole AMX tiles of 64 int8 or 32 bf16 columns.
  [[nodiscard]] int64_t packed_steps() const;

  WeightFormat format_;
  ActFormat act_ = ActFormat::kFloat;
  int64_t n_ = 0;
  int64_t k_ = 0;
  bool bf16_scales_ = false;
  float scale_factor_ = 1.0F;  // of packed scales over the tensor's
  Buffer codes_;
  Buffer scales_;
  Buffer zeros_;
  Buffer row_sums_;
};

}  // namespace nibble::cpu
