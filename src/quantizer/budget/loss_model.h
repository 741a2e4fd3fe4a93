#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nibble {

/// What is known of a candidate's loss.
struct KnownLoss {
  std::string kind;           // "q_proj"
  double error = 0;           // relative squared error that the divergence was measured at
  std::optional<double> kld;  // nats, with this candidate alone rounded; empty: not measured
  bool typical = false;       // stands for those of its kind that were not measured
};

/// Nats per relative squared error, by candidate. To second order the divergence of a model is the
/// sum of those that its matrices cause alone, and each grows with the squared error of its
/// outputs: KLD = sum of weight x error. Candidates that were not measured get the median of the
/// typical ones of their kind, else of all measured ones. Without any measurement all weights are
/// 1, and sums are not nats.
[[nodiscard]] std::vector<double> loss_weights(std::span<const KnownLoss> known);

}  // namespace nibble
