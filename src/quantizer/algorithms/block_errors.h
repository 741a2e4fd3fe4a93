#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "quant/block_precision.h"

namespace nibble {

/// Shares of a block's largest magnitude that are tried as the end of its 4-bit codes; those of 8
/// bits span it all.
inline constexpr std::array<float, 7> kClips = {0.7F, 0.75F, 0.8F, 0.85F, 0.9F, 0.95F, 1.0F};

/// What rounding the rows of a site in blocks of channels costs: squares of what it changes in the
/// outputs of the site's matrices, summed over rows, each block by itself.
struct BlockCosts {
  // By block and clip: codes of the fewer bits. Infinite for clips that are not tried.
  std::vector<std::array<double, kClips.size()>> low;
  std::vector<double> high;  // by block: codes of the more bits
};

/// How channels of a row share scales.
struct BlockForm {
  int block = 128;
  BlockScales scales = BlockScales::kEach;
  double outlier_share = 0;  // of blocks that are expected to have the more bits, where the others
                             // share a scale: those of a row with the largest numbers do not widen
                             // that
};

/// Sums over the rows that enter a site: of the products of what rounding a block of channels
/// changes in them, [block, block] for each block and each way to round it. The changes of two
/// blocks count as independent of each other. Does not depend on the number of threads.
class BlockErrors final {
 public:
  /// k: a multiple of the block, which is a multiple of 16.
  BlockErrors(int64_t k, const BlockForm& form);

  /// Rows [rows, k] f32, finite, their channels in the order in which they are cut into blocks.
  void add(const float* x, int64_t rows, ThreadPool& pool);
  /// Adds to the costs those of a matrix, or some rows of it: trace(W_b S W_b^T) of each block's
  /// sums S and columns W_b.
  ///   w      [n, k], columns in the order of the rows' channels
  ///   costs  of as many blocks, or empty
  void add_costs(const float* w, int64_t n, BlockCosts& costs, ThreadPool& pool) const;

  [[nodiscard]] int64_t blocks() const { return k_ / block_; }

 private:
  /// The largest magnitude of each block of each row, and, of classes, that of the row's 4-bit and
  /// of its 8-bit class: what their scales are made of, each as it would be alone.
  void find_largest(const float* x, int64_t rows, ThreadPool& pool);
  [[nodiscard]] float largest(int64_t row, int64_t block, int bits) const;
  /// Whether blocks are rounded this way at all.
  [[nodiscard]] bool tries(int64_t way) const;
  /// A row's block, rounded this way.
  void round(int64_t way, int64_t row, int64_t block, float* x) const;
  [[nodiscard]] int64_t scales_of_row() const { return blocks() + 2; }

  int64_t k_;
  int64_t block_;
  BlockForm form_;
  std::vector<float> largest_;  // [rows, blocks and two classes]
  std::vector<float> sums_;     // [blocks, ways, block, block]
};

}  // namespace nibble
