#pragma once

#include "base/status.h"
#include "calibration/block_finder.h"
#include "calibration/transform_chain.h"
#include "quantize_flags.h"

namespace nibble {

/// --block, --outlier-share, --max-kld and --permute.
void add_block_flags(CLI::App& command, QuantizeFlags& flags);

/// Where the scheme has activations in blocks: takes the row of the table that has --block, and
/// notes that a text decides, so that a plan can be made. kInvalidArgument, naming them, for these
/// flags beside another scheme, for values out of range, and for a block that no row has.
Status settle_blocks(QuantizeFlags& flags);

/// Whether the scheme of the run has activations in blocks.
[[nodiscard]] bool in_blocks(const QuantizeFlags& flags);

/// What the factors of transforms may expect of the choice.
[[nodiscard]] ExpectedBlocks expected_blocks(const QuantizeFlags& flags);

/// Judges the blocks of flags.options.source by the text and chooses those with the more bits:
/// those within --outlier-share, or by --max-kld as few as keep the divergence below it, measured
/// with the nearest codes for weights over windows that the model was not calibrated with. Enters
/// the choice into flags.blocks. Errors: those of find_blocks() and VariantMeter; kInvalidArgument
/// for a share less than that of any block, or a divergence that no share of blocks keeps below.
Result<SiteActs> choose_blocks(QuantizeFlags& flags);

}  // namespace nibble
