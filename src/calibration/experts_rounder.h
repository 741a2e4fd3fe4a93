#pragma once

#include <cstdint>

#include "calibration/layer_rounder.h"

namespace nibble {

/// Rounds the routed experts of a layer, and the one that every token takes, whose attention is
/// rounded; then runs them. An expert's statistics are those of the rows that are routed to it,
/// shrunk to those of all its layer's rows, which count as much as a quarter of the columns. One
/// with fewer rows than an eighth of its columns is rounded by imatrix where the method needs more.
/// Where the sums of all experts find no room in JobMakerContext::memory, several passes collect
/// those of a few; the result is the same.
Status round_experts(const LayerParts& parts, int64_t layer);

}  // namespace nibble
