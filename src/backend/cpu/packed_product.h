#pragma once

#include <array>
#include <string>

#include "backend/cpu/registry.h"
#include "backend/cpu/row_rounder.h"

namespace nibble::cpu {

/// Which scales of weights a product takes.
enum class TiledScales : uint8_t {
  kAny,          // none, per channel, or per group of 8, 16, 32 or a multiple of 32
  kChannel,      // one for each output channel
  kUsualGroups,  // several groups of 32, 64 or 128
  kLevels,       // groups of 64 or 128 in two levels (quant/levels.h)
  kBlocks,       // groups of 32, 64 or 128, of which there may be one
};

/// What activations are rounded to besides their ActFormat.
enum class TiledRounding : uint8_t { kNone, kFixed /* FixedRow */ };

/// A product of weights as PackedMatrix lays them out.
struct TiledProduct {
  std::string_view name;
  WeightCode code = WeightCode::kF32;
  std::array<ActFormat, 2> acts = {ActFormat::kFloat, ActFormat::kBf16};  // either
  TiledScales scales = TiledScales::kAny;
  TiledRounding rounding = TiledRounding::kNone;
  ZeroPoints zero_points = ZeroPoints::kNone;
  KernelTable::Gemm GemmKernels::*rows = nullptr;       // for a few rows
  KernelTable::TileGemm TileKernels::*tiles = nullptr;  // for many, with AMX; null: rows only

  [[nodiscard]] bool accepts(const GemmProblem& problem, const GemmDevice& device) const;
};

/// Rounded rows that a product reads: where row 0 lies among m rows of one form, in tiles or not.
struct RoundedRows {
  uint8_t* memory = nullptr;
  float* scales = nullptr;  // [m]
  int32_t* sums = nullptr;  // [m]
  int64_t m = 0;

  /// Bytes between the slabs of m rows in tiles.
  [[nodiscard]] static int64_t slab_stride(int64_t m) {
    return (m + 15) / 16 * kSlabPieces * kTileBytes;
  }
};

/// Tiles [begin, end) of a matrix.
struct TileRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// Where results of a product go.
struct ProductOutput {
  Activations y;  // [m, n], rows `stride` apart
  int64_t stride = 0;
  GemmOutput mode = GemmOutput::kStore;
  const float* bias = nullptr;  // [n] or null
};

/// The kernels that multiply packed matrices of one form and shape: one for a few rows, which reads
/// the weights as fast as memory gives them, and with AMX one for many.
class PackedProduct final {
 public:
  /// `product` accepts what `matrix` was packed for.
  PackedProduct(const PackedMatrix& matrix,
                const ActSpec& spec,
                const TiledProduct& product,
                const GemmDevice& device);

  [[nodiscard]] const RowRounder& rounder() const { return rounder_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  /// Whether m rows are multiplied in tiles.
  [[nodiscard]] bool in_tiles(int64_t m) const {
    return tile_kernel_ != nullptr && m >= fewest_tile_rows_;
  }
  /// Bytes that m rounded rows take.
  [[nodiscard]] int64_t rows_bytes(int64_t m) const;
  /// Where one of m rows goes.
  [[nodiscard]] RoundedRow row_at(const RoundedRows& rows, int64_t row) const;

  /// Rows [first, end) of `rows`, a multiple of 16 in tiles, times tiles of the matrix.
  ///   floats  f32 rows to read instead, `floats_stride` apart, where the rounder reads_as_given()
  struct Task {
    RoundedRows rows;
    int64_t first = 0;
    int64_t end = 0;
    ProductOutput output;  // of row 0
    const float* floats = nullptr;
    int64_t floats_stride = 0;
    int thread = 0;
  };
  void multiply(const PackedMatrix& matrix, const Task& task, TileRange tiles) const;

 private:
  [[nodiscard]] int64_t slabs_bytes(int64_t m) const;
  /// In tiles, of rows in blocks that have a scale each: [m/16][blocks][16].
  [[nodiscard]] float* block_scales(const RoundedRows& rows, int64_t row) const;
  [[nodiscard]] ProductTask product_task(const PackedMatrix& matrix,
                                         const Task& task,
                                         int64_t row) const;
  void multiply_rows(const PackedMatrix& matrix, const Task& task, TileRange tiles) const;
  void multiply_tiles(const PackedMatrix& matrix, const Task& task, TileRange tiles) const;

  Workspace& workspace_;
  RowRounder rounder_;
  bool fetch_far_ = true;  // see CpuFeatures
  KernelTable::Gemm row_kernel_ = nullptr;
  KernelTable::TileGemm tile_kernel_ = nullptr;  // null: rows only
  int64_t fewest_tile_rows_ = 0;
  std::string name_;
};

}  // namespace nibble::cpu
