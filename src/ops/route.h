#pragma once

#include <cstdint>
#include <span>

#include "core/router_form.h"

namespace nibble {

/// A token's way to its experts.
struct RouteArgs {
  std::span<const float> logits;      // one for each expert
  std::span<const float> correction;  // of each expert, or empty
  RouterForm form;
  std::span<int32_t> chosen;  // top_k experts, all different, best first; ties: lowest first
  std::span<float> weights;   // theirs
};

/// Most experts that a router chooses from.
inline constexpr int64_t kMostExperts = 1024;

/// Chooses and weighs in F32. NaN counts as -inf where experts are chosen, so that they always
/// differ, and makes the weights that it takes part in NaN. Groups have at least two experts, and
/// those kept at least top_k.
void route(const RouteArgs& args);

/// The same in double precision, by sorting: the oracle.
void reference_route(const RouteArgs& args);

}  // namespace nibble
