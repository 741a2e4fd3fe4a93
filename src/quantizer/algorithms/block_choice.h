#pragma once

#include <cstdint>
#include <vector>

#include "quantizer/algorithms/block_errors.h"

namespace nibble {

/// A site whose blocks are chosen.
struct BlockSite {
  BlockCosts costs;
  double outputs = 0;  // squares of the outputs that the costs are shares of; 0: they count nothing
  int64_t work = 0;   // multiply-adds of a block over the text: channels times rows of all matrices
                      // times rows that enter them; 0: none does, and more bits cost nothing
  int64_t parts = 1;  // that the channels are cut into, each with as many blocks of the more
                      // bits as the others: of the devices that share a product by its columns
};

/// How the rows of a site are rounded.
struct SiteBlocks {
  std::vector<uint8_t> bits;  // by block: the fewer or the more
  float clip = 1.0F;          // of the 4-bit blocks
};

struct BlockChoice {
  std::vector<SiteBlocks> sites;
  double outlier_share = 0;  // multiply-adds with blocks of the more bits, of all
  double error = 0;          // of the outputs, as shares of them, summed over sites
};

/// Which blocks of a model's sites are worth twice the bits of the others, best first: by what
/// these take away of the errors of outputs, relative to the site's outputs, for a multiply-add.
/// The order is the same for every share.
class BlockRanking final {
 public:
  explicit BlockRanking(std::vector<BlockSite> sites, uint8_t low_bits = 4);

  /// The best blocks whose multiply-adds are at most this share of all; what does not fit is passed
  /// over. Then the clip of each site whose blocks of fewer bits lose least. share: 0..1.
  [[nodiscard]] BlockChoice choose(double share) const;
  /// The least share that gives any block the more bits.
  [[nodiscard]] double least_share() const;
  [[nodiscard]] const std::vector<BlockSite>& sites() const { return sites_; }

 private:
  /// Blocks that are given the more bits together: one in each part.
  struct Unit {
    size_t site = 0;
    std::vector<size_t> blocks;
    double gain = 0;  // for a multiply-add
    int64_t work = 0;
  };
  void add_units(size_t site);
  void choose_clip(size_t site, BlockChoice& choice) const;

  std::vector<BlockSite> sites_;
  uint8_t low_bits_;
  std::vector<Unit> units_;  // best first
  int64_t work_ = 0;         // of all blocks
};

/// Into how many parts, 8 or a smaller power of two, k channels can be cut at ends of blocks.
[[nodiscard]] int64_t equal_parts(int64_t k, int64_t block);

}  // namespace nibble
