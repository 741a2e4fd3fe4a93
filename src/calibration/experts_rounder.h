#pragma once

#include <cstdint>
#include <vector>

#include "calibration/expert_sums.h"
#include "calibration/layer_rounder.h"

namespace nibble {

/// Rounds the routed experts of a layer, and the one that every token takes, whose attention is
/// rounded; then runs them. An expert's statistics are those of the rows that are routed to it,
/// shrunk to those of all its layer's rows, which count as much as a quarter of the columns. One
/// with fewer rows than an eighth of its columns is rounded by imatrix where the method needs more.
/// Where the sums of all experts find no room in JobMakerContext::memory, several passes collect
/// those of a few; the result is the same.
Status round_experts(const LayerParts& parts, int64_t layer);

/// Fewer rows than this share of the columns say too little for GPTQ.
inline constexpr int64_t kFewestRowsShare = 8;

/// What the sums over all rows of a layer are multiplied with before they are added to an expert's:
/// they count as a quarter of the columns.
[[nodiscard]] inline double layer_share(int64_t k, int64_t rows) {
  return static_cast<double>(k) / kLayerShare / static_cast<double>(rows);
}

/// One of the products of all experts of a layer.
struct ExpertProduct {
  int64_t layer = 0;
  ExpertPart part = ExpertPart::kGateUp;
  int64_t k = 0;
};
/// Says in the log which experts had too few rows.
void report_few(const LayerParts& parts,
                const ExpertProduct& product,
                const std::vector<int64_t>& few);

}  // namespace nibble
