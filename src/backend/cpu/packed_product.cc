#include "backend/cpu/packed_product.h"

#include <algorithm>

#include "backend/cpu/isa.h"
#include "backend/cpu/numbers.h"
#include "base/math.h"

namespace nibble::cpu {
namespace {

/// Groups of these sizes have kernels of their own.
bool has_usual_groups(int64_t groups, int64_t group_size) {
  return groups > 1 && (group_size == 32 || group_size == 64 || group_size == 128);
}

/// Groups that blocks of kMaxBlock columns divide, or that divide them.
bool has_whole_blocks(int64_t group_size) {
  return group_size % kStepColumns == 0 &&
         (group_size % kMaxBlock == 0 || kMaxBlock % group_size == 0);
}

bool takes_scales(TiledScales scales, const WeightFormat& format, int64_t k) {
  const int64_t groups = format.groups(k);
  const bool whole_groups = format.scale_per == ScalePer::kBlock || !format.grouped() ||
                            k % format.group_size == 0 || groups == 1;
  switch (scales) {
    case TiledScales::kAny:
      return whole_groups && (groups <= 1 || has_whole_blocks(format.group_size));
    case TiledScales::kChannel:
      return groups == 1;
    case TiledScales::kUsualGroups:
      return whole_groups && has_usual_groups(groups, format.group_size);
    case TiledScales::kLevels:
      return format.scale_per == ScalePer::kGroup && k % format.group_size == 0 &&
             (format.group_size == 64 || format.group_size == 128);
    case TiledScales::kBlocks:
      return format.scale_per == ScalePer::kGroup && k % format.group_size == 0 &&
             is_block_size(format.group_size);
  }
  return false;
}

/// Tiles hold int8 and bf16: activations in f32 do not fit, nor groups of unusual sizes.
bool fits_tiles(const PackedWeights& w, const PackedMatrix& matrix) {
  const ActFormat act = matrix.act();
  if (act == ActFormat::kIntBlocks && matrix.format().grouped()) {
    return w.k % w.group_size == 0 && is_block_size(w.group_size);
  }
  return act != ActFormat::kFloat &&
         (w.groups <= 1 || (has_usual_groups(w.groups, w.group_size) && w.k % w.group_size == 0));
}

/// From this many rows on tiles beat vectors, which fill no more than one row of a tile each.
/// With 4 bits in groups they win earlier: vectors multiply 16 bits at half the rate of 8, and take
/// long to decode them for floats.
int64_t fewest_tile_rows(const PackedWeights& w, const PackedMatrix& matrix, bool fixed) {
  const WeightCode code = matrix.format().code;
  const bool four_bits = code == WeightCode::kInt4 || code == WeightCode::kFp4E2M1;
  if (!four_bits || w.groups <= 1 || is_integer(matrix.act())) {
    return 5;
  }
  return fixed ? 3 : 2;
}

}  // namespace

bool TiledProduct::accepts(const GemmProblem& problem, const GemmDevice& device) const {
  const WeightFormat& format = problem.weight;
  return format.code == code && std::ranges::count(acts, problem.act) > 0 &&
         format.zero_points == zero_points && takes_scales(scales, format, problem.k) &&
         !(device.exact && rounding == TiledRounding::kFixed);
}

PackedProduct::PackedProduct(const PackedMatrix& matrix,
                             const ActSpec& spec,
                             const TiledProduct& product,
                             const GemmDevice& device)
    : workspace_(device.workspace),
      rounder_(matrix,
               spec,
               RowRounder::Fixed{product.rounding == TiledRounding::kFixed},
               device.kernels,
               device.workspace),
      fetch_far_(detect_cpu_features().fetch_far),
      row_kernel_(device.kernels.*product.rows),
      name_(fmt::format("{}_{}", product.name, device.kernels.name)) {
  const PackedWeights w = matrix.view();
  if (product.tiles != nullptr && fits_tiles(w, matrix)) {
    tile_kernel_ = device.kernels.*product.tiles;
  }
  fewest_tile_rows_ = fewest_tile_rows(w, matrix, product.rounding == TiledRounding::kFixed);
}

int64_t PackedProduct::slabs_bytes(int64_t m) const {
  return round_up(rounder_.pieces(), kSlabPieces) / kSlabPieces * RoundedRows::slab_stride(m);
}

float* PackedProduct::block_scales(const RoundedRows& rows, int64_t row) const {
  auto* scales = reinterpret_cast<float*>(rows.memory + slabs_bytes(rows.m));
  return scales + row / 16 * 16 * rounder_.scaled_blocks() + row % 16;
}

int64_t PackedProduct::rows_bytes(int64_t m) const {
  if (!in_tiles(m)) {
    return m * rounder_.row_bytes();
  }
  const int64_t scales = round_up(m, 16) * rounder_.scaled_blocks();
  return slabs_bytes(m) + scales * static_cast<int64_t>(sizeof(float));
}

RoundedRow PackedProduct::row_at(const RoundedRows& rows, int64_t row) const {
  const bool tiles = in_tiles(rows.m);
  const int64_t offset =
      tiles ? row / 16 * kSlabPieces * kTileBytes + row % 16 * 64 : row * rounder_.row_bytes();
  return {
      .out = rows.memory + offset,
      .slab_stride = tiles ? RoundedRows::slab_stride(rows.m) : 0,
      .scale = tiles && rounder_.scaled_blocks() > 0 ? block_scales(rows, row) : rows.scales + row,
      .sum = rows.sums + row};
}

ProductTask PackedProduct::product_task(const PackedMatrix& matrix,
                                        const Task& task,
                                        int64_t row) const {
  ProductTask product;
  product.w = matrix.view();
  product.w.fetch_far = fetch_far_;
  product.m = task.end - row;
  product.y = numbers_of(task.output.y.at(row * task.output.stride));
  product.y_stride = task.output.stride;
  product.add = task.output.mode == GemmOutput::kAdd;
  product.bias = task.output.bias;
  if (rounder_.has_token_scale()) {
    product.x_scales = task.rows.scales + row;
    product.x_sums = task.rows.sums + row;
  }
  if (const BlockPrecision* blocks = rounder_.blocks(); blocks != nullptr) {
    product.x_block = blocks->block;
    product.x_bits = blocks->bits.data();
    product.x_code_bytes = rounder_.code_bytes();
  }
  return product;
}

void PackedProduct::multiply(const PackedMatrix& matrix, const Task& task, TileRange tiles) const {
  if (in_tiles(task.rows.m)) {
    multiply_tiles(matrix, task, tiles);
  } else {
    multiply_rows(matrix, task, tiles);
  }
}

void PackedProduct::multiply_rows(const PackedMatrix& matrix,
                                  const Task& task,
                                  TileRange tiles) const {
  const float* floats =
      task.floats != nullptr ? task.floats : reinterpret_cast<const float*>(task.rows.memory);
  const int64_t floats_stride = task.floats != nullptr ? task.floats_stride : matrix.k();
  for (int64_t row = task.first; row < task.end; row += kRowPanel) {
    GemmTask part;
    static_cast<ProductTask&>(part) = product_task(matrix, task, row);
    part.m = std::min(kRowPanel, part.m);
    part.x = floats + (rounder_.integer() ? 0 : row * floats_stride);
    part.x_stride = floats_stride;
    part.xq_stride = rounder_.integer() ? rounder_.row_bytes() : rounder_.pieces() * 64;
    part.xq = task.rows.memory + row * part.xq_stride;
    row_kernel_(part, tiles.begin, tiles.end);
  }
}

void PackedProduct::multiply_tiles(const PackedMatrix& matrix,
                                   const Task& task,
                                   TileRange tiles) const {
  for (int64_t row = task.first; row < task.end; row += kTileSumRows) {
    TileGemmTask part;
    static_cast<ProductTask&>(part) = product_task(matrix, task, row);
    part.m = std::min(kTileSumRows, part.m);
    part.x = task.rows.memory + row / 16 * kSlabPieces * kTileBytes;
    part.slab_stride = RoundedRows::slab_stride(task.rows.m);
    part.x_pieces = rounder_.pieces();
    part.x_group_scales = rounder_.scaled_blocks() > 0 ? block_scales(task.rows, row) : nullptr;
    part.scratch = workspace_.tile_scratch(task.thread);
    tile_kernel_(part, tiles.begin, tiles.end);
  }
}

}  // namespace nibble::cpu
