#pragma once

#include <cstdint>

namespace nibble {

/// One of several devices that share out the routed experts of every layer, each as many of them,
/// in the order of their numbers. Routers choose among all experts; a device computes those it has.
struct ExpertShare {
  int64_t rank = 0;
  int64_t ranks = 1;

  constexpr bool operator==(const ExpertShare&) const = default;
  /// Whether the device has all experts.
  [[nodiscard]] constexpr bool whole() const { return ranks == 1; }
  /// Whether as many experts can be shared out.
  [[nodiscard]] constexpr bool divides(int64_t experts) const {
    return ranks >= 1 && rank >= 0 && rank < ranks && experts % ranks == 0;
  }
  /// The first of this device's experts, and how many it has, of so many.
  [[nodiscard]] constexpr int64_t first(int64_t experts) const { return rank * count(experts); }
  [[nodiscard]] constexpr int64_t count(int64_t experts) const { return experts / ranks; }
};

}  // namespace nibble
