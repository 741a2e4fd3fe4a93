#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// What changes the weights of a model without changing what it computes.
///   kRotate  the residual stream, and the values of each head, are multiplied by a rotation, which
///            weights on both sides absorb (QuaRot, arXiv 2404.00456, its parts without cost)
///   kSmooth  channels that enter products are divided by what their weights are multiplied by,
///            chosen by the largest activations (SmoothQuant, arXiv 2211.10438)
///   kAwq     the same, chosen by the mean activations (AWQ, arXiv 2306.00978)
///   kPermute channels that multiply alike become neighbours, so that groups have like weights and
///            like errors
///   kTurn    what the down projections of MLPs multiply is turned by a Hadamard matrix while the
///            model runs, and their weights back (R4 of SpinQuant, arXiv 2405.16406)
enum class Transform : uint8_t { kRotate, kSmooth, kAwq, kPermute, kTurn };

[[nodiscard]] std::string_view transform_name(Transform transform);
/// Whether it looks at what the model makes of a text.
[[nodiscard]] constexpr bool needs_text(Transform transform) {
  return transform != Transform::kRotate && transform != Transform::kTurn;
}

/// A chain: transforms, then one rounding.
struct Method {
  std::vector<Transform> transforms;
  Rounding rounding = Rounding::kRtn;

  [[nodiscard]] bool needs_text() const;
};

/// "rotate,smooth,gptq": names with commas between; a chain without a rounding ends in rtn.
/// kInvalidArgument for a name that is unknown or twice, or a transform after the rounding.
Result<Method> parse_method(std::string_view text);
/// What parse_method() reads.
[[nodiscard]] std::string method_name(const Method& method);

}  // namespace nibble
