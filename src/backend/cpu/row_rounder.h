#pragma once

#include "backend/cpu/packing.h"
#include "backend/cpu/workspace.h"
#include "ops/activations.h"
#include "quant/act_spec.h"

namespace nibble::cpu {

/// Where a rounded row lies.
struct RoundedRow {
  uint8_t* out = nullptr;
  // 0: the row's bytes follow each other. Else it is one of TileGemmTask's, in pieces of 64 bytes,
  // kTileBytes apart in slabs that are so far apart.
  int64_t slab_stride = 0;
  float* scale = nullptr;  // of rows with one; in tiles of the first block of those with one each
  int32_t* sum = nullptr;  // of rows of INT8 with one scale
};

/// Makes rows of activations what the products of one form of weights read.
class RowRounder final {
 public:
  /// For products of `matrix` with rows as `spec` says; fixed: as FixedRow says.
  enum class Fixed : bool { kNo, kYes };
  RowRounder(const PackedMatrix& matrix,
             const ActSpec& spec,
             Fixed fixed,
             const KernelTable& kernels,
             Workspace& workspace);

  /// Rounds the row at `x`, to which `input` is done first.
  ///   next  the row that this thread rounds next, or null: it is fetched meanwhile
  void round(ConstActivations x,
             const GemmInput& input,
             const void* next,
             const RoundedRow& to,
             int thread) const;

  /// Whether rows in F32 that are `input` are read where they lie.
  [[nodiscard]] bool reads_as_given(DType type, const GemmInput& input) const;
  /// Whether products of `other`'s form read the same rows.
  [[nodiscard]] bool rounds_like(const RowRounder& other) const;
  [[nodiscard]] int64_t k() const { return k_; }
  [[nodiscard]] ActFormat act() const { return spec_.format; }
  /// Whether rows become integers, not floats.
  [[nodiscard]] bool integer() const { return fixed_ || is_integer(spec_.format); }
  /// Bytes of a row whose bytes follow each other.
  [[nodiscard]] int64_t row_bytes() const;
  /// Pieces of 64 bytes of a row of int8 or bf16 in tiles.
  [[nodiscard]] int64_t pieces() const;
  /// Whether each row has one scale: INT8, FP8, and blocks that share it, which are INT8 to
  /// products.
  [[nodiscard]] bool has_token_scale() const;
  /// Of rows in blocks with several scales: bytes of the codes, behind which groups lie.
  [[nodiscard]] int64_t code_bytes() const;
  /// The blocks of rows that have such, with a scale for each; 0: others.
  [[nodiscard]] int64_t scaled_blocks() const;
  [[nodiscard]] const BlockPrecision* blocks() const { return spec_.blocks.get(); }

 private:
  /// Of rows in blocks: all of them share a scale.
  [[nodiscard]] bool in_classes() const {
    return blocks() != nullptr && block_scales_ == BlockScales::kClass;
  }
  void fetch(const void* row, DType type, const GemmInput& input) const;
  /// The row that the product sees, before rounding: as given or in the buffer.
  ConstNumbers input_row(ConstActivations x, const GemmInput& input, float* buffer) const;
  /// A row with its columns in the order of the weights, and within the range of a static scale.
  ConstNumbers specified_row(ConstNumbers row, float* buffer, int thread) const;
  [[nodiscard]] float largest_code() const;
  /// The magnitude to which a static scale gives the largest code; 0: the row has its own.
  ///   row  of specified_row()
  [[nodiscard]] float given_largest(ConstNumbers row) const;
  void to_int8(ConstNumbers x, const void* next, const RoundedRow& to) const;
  void to_blocks(ConstNumbers x, const RoundedRow& to, int thread) const;
  void to_classes(ConstNumbers x, const RoundedRow& to) const;
  void to_wide_blocks(ConstNumbers x, const RoundedRow& to) const;
  void to_floats(ConstNumbers x, float* buffer, const RoundedRow& to) const;
  /// A row rounded to FP8 with a scale for each group, as numbers again.
  void round_fp8_groups(const float* x, float* out) const;
  const float* floats_of(ConstNumbers row, float* buffer) const;

  const KernelTable& kernels_;
  Workspace& workspace_;
  ActSpec spec_;
  int64_t k_ = 0;
  int64_t group_size_ = 0;
  BlockScales block_scales_ = BlockScales::kEach;
  int32_t int8_offset_ = 0;  // added to INT8 codes: some instructions multiply unsigned ones
  bool fixed_ = false;
};

}  // namespace nibble::cpu
