#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nibble {

/// What is known of a candidate's loss.
struct KnownLoss {
  std::string kind;  // "q_proj"
  int64_t layer = 0;
  double error = 0;           // relative squared error that the divergence was measured at
  std::optional<double> kld;  // nats, with this candidate alone rounded; empty: not measured
};

/// Nats per relative squared error, by candidate. To second order the divergence of a model is the
/// sum of those that its matrices cause alone, and each grows with the squared error of its
/// outputs: KLD = sum of weight x error. Candidates that were not measured lie, in logarithms, on
/// the line between the nearest measured layers of their kind, or are as the nearest one; the first
/// and the last measured layer, which often weigh several times as much as the rest, count for
/// themselves alone where others lie between them. Of a kind without any they get the geometric
/// mean of all. Without any measurement all weights are 1, and sums are not nats.
[[nodiscard]] std::vector<double> loss_weights(std::span<const KnownLoss> known);

}  // namespace nibble
