#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "calibration/site_acts.h"
#include "quantizer/algorithms/block_choice.h"
#include "quantizer/plan.h"

namespace nibble {

/// Whether channels are put into another order within a site, or lie as the model has them, which
/// may have been permuted before (Transform::kPermute).
enum class ChannelMoves : uint8_t { kNone, kGather };

struct BlockFinding {
  const std::string& model;  // folder
  const CheckpointReader& reader;
  const QuantizePlan& plan;  // of it
  const std::vector<std::vector<int32_t>>& windows;
  ChannelMoves moves = ChannelMoves::kNone;
  int block = 128;                        // channels; grouped weights have groups of as many
  ActFormat act = ActFormat::kIntBlocks;  // in which of the two pairs of precisions
  double outlier_share = 0.16;  // of blocks of the more bits that is expected, where others share
                                // scales
  std::string beside;           // where a file for hidden states is made, which has no name
  int threads = 1;
  const std::atomic<bool>* stop = nullptr;
};

/// Rows that are rounded in blocks.
struct FoundSite {
  SiteInput input;
  std::shared_ptr<const std::vector<int32_t>> columns;  // as of ActSpec; null where channels stay
  double rows = 1;                                      // SiteAct::rows
};

/// What either precision costs the blocks of a model: of the same number of sites, in the same
/// order.
struct FoundBlocks {
  ActFormat act = ActFormat::kIntBlocks;
  int block = 0;
  int64_t parts = 1;  // of split sites: split_parts()
  std::vector<FoundSite> sites;
  BlockRanking ranking;

  [[nodiscard]] SiteActs acts(const BlockChoice& choice) const;
};

/// Runs the model, not rounded anywhere, layer by layer over the windows, and judges each block of
/// the rows that enter products with activations in blocks: the squares that the fewer bits, 4 of
/// them clipped in several ways, and the more bits change in the outputs. Where channels are
/// gathered they are ordered first, by the mean of their squares, the largest first; those that
/// devices may share by columns (of attention's output and of down) stay within each of
/// split_parts(). Of routed experts gate and up of a layer have one order and one choice, by all
/// rows of the layer, each expert's weights counted by the rows that it gets; each down has its
/// own, by those rows. Errors of an expert's outputs are shares of all of its layer's, and one that
/// no row gets has the more bits throughout. Errors: those of LayerRunner::open(); kUnsupported for
/// blocks of several sizes or pairs of precisions; kInvalidArgument for inputs that are no multiple
/// of a block, and for inputs that are no numbers, naming the matrix; kCancelled, kIo.
Result<FoundBlocks> find_blocks(const BlockFinding& finding);

}  // namespace nibble
