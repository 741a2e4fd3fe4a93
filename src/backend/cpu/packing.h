#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cpu/kernel_table.h"
#include "base/thread_pool.h"
#include "core/buffer.h"
#include "quant/levels.h"
#include "quant/quant_view.h"

namespace nibble::cpu {

/// Owned memory of one packed matrix; PackedWeights describes the layout.
class PackedMatrix final {
 public:
  using Parts = std::span<const QuantView>;

  /// Sizes and allocates the layout of the parts' rows below each other, for activations in `act`,
  /// then packs them; each thread packs the tiles that it will multiply with. The parts have one
  /// format, which an entry of the registry accepts with `act`, and one k. kCorrupt for NaN codes;
  /// the errors of check_levels().
  static Result<PackedMatrix> create(Parts parts,
                                     ActFormat act,
                                     BufferArena& arena,
                                     ThreadPool& pool);
  /// The same of many matrices, of which each thread packs whole ones where there are enough: a
  /// model has 46,000 of experts, and a loop of all threads for each takes longer than small ones.
  static Result<std::vector<PackedMatrix>> create_all(
      std::span<const std::vector<QuantView>> matrices,
      ActFormat act,
      BufferArena& arena,
      ThreadPool& pool);

  /// Packs other weights of the same format and k over the rows from first_row on, in the same
  /// memory; leaves them as they are when the new ones cannot be used.
  Status update(int64_t first_row, const QuantView& weight, ThreadPool& pool);
  /// The exact inverse of pack().
  [[nodiscard]] Result<QuantTensor> unpack() const;

  [[nodiscard]] PackedWeights view() const;
  [[nodiscard]] const WeightFormat& format() const { return format_; }
  [[nodiscard]] ActFormat act() const { return act_; }
  [[nodiscard]] int64_t n() const { return n_; }
  [[nodiscard]] int64_t k() const { return k_; }
  [[nodiscard]] int64_t tiles() const { return (n_ + kTileRows - 1) / kTileRows; }
  /// Codes, scales, zero points, minimums, levels and sums, padding included.
  [[nodiscard]] int64_t bytes() const;

 private:
  // A row of the matrix: which part it comes from, and where in it.
  struct RowSource {
    const QuantView* part = nullptr;  // null: a row past n
    int64_t row = 0;
  };

  /// Everything but memory: sizes and types.
  static PackedMatrix sized(Parts parts, ActFormat act);
  Status allocate(BufferArena& arena);
  /// False when a tile's rows are not valid; the tile is packed nevertheless.
  bool pack_tile(Parts parts, int64_t tile);
  /// Packs tiles [first, end) of the rows of the parts below each other.
  Status pack(Parts parts, int64_t first, int64_t end, ThreadPool& pool);
  /// Names the first row that is not valid.
  [[nodiscard]] Status invalid_rows(Parts parts) const;
  /// Rows [first, end) of one tile as they are now, in canonical form.
  [[nodiscard]] Result<QuantTensor> unpack_rows(int64_t first, int64_t end) const;
  enum class GroupNumbers : uint8_t { kScales, kMinimums };
  void pack_numbers(GroupNumbers which, std::span<const RowSource> rows, int64_t tile);
  void pack_zeros(std::span<const RowSource> rows, int64_t tile);
  /// Scales, steps and zero points of groups in two levels, of rows that have them.
  void pack_levels(std::span<const RowSource> rows, int64_t tile);
  /// Scales and zero points of row `row` of `weight`, which is row `place` of the tiles.
  void unpack_levels(QuantTensor& weight, int64_t row, int64_t place) const;
  [[nodiscard]] bool has_levels() const { return in_two_levels(format_, act_); }
  /// Scales of a row beside the codes.
  [[nodiscard]] int64_t packed_groups() const { return has_levels() ? 1 : format_.groups(k_); }
  /// Writes the tile's rows to `weight`, whose first row is `first`, as far as that has them.
  void unpack_tile(QuantTensor& weight, int64_t tile, int64_t first) const;
  /// Packed number `index` as the tensor has it.
  [[nodiscard]] float unpacked(GroupNumbers which, int64_t index) const;
  [[nodiscard]] int64_t steps() const { return (k_ + kStepColumns - 1) / kStepColumns; }
  /// Steps of a tile in memory: whole AMX tiles of 64 int8 or 32 bf16 columns.
  [[nodiscard]] int64_t packed_steps() const;

  WeightFormat format_;
  ActFormat act_ = ActFormat::kFloat;
  int64_t n_ = 0;
  int64_t k_ = 0;
  ScaleType scale_type_ = ScaleType::kF32;
  float scale_factor_ = 1.0F;  // of packed scales over the tensor's
  Buffer codes_;
  Buffer scales_;
  Buffer zeros_;
  Buffer minimums_;
  Buffer levels_;
  Buffer row_sums_;
};

}  // namespace nibble::cpu
