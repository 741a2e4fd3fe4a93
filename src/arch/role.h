#pragma once

#include <cstdint>

namespace nibble {

/// What a module of a transformer is for. Those from kAttentionNorm on belong to a layer, those
/// from kExpertGate on to one of its experts.
enum class Role : uint8_t {
  kEmbedding,
  kPositions,  // a table of learned positions
  kFinalNorm,
  kHead,
  kAttentionNorm,
  kQuery,
  kKey,
  kValue,
  kAttentionOutput,
  kQueryNorm,  // over each head, before the rotation
  kKeyNorm,
  kSinks,          // a logit per head that takes part in the softmax and has no value
  kQueryDown,      // latent attention: queries by way of a low rank
  kQueryDownNorm,  //
  kQueryUp,
  kLatentDown,  // the cached latent of keys and values, with the rotated part of the keys
  kLatentNorm,
  kLatentUp,
  kMlpNorm,
  kGate,
  kUp,
  kDown,
  kRouter,
  kRouterCorrection,  // added to the router's scores to choose experts, not to weigh them
  kSharedGate,        // the expert that every token takes
  kSharedUp,
  kSharedDown,
  kSharedExpertGate,   // how much of it
  kExpertsGateUpBias,  // of all experts
  kExpertsDownBias,
  kExpertGate,
  kExpertUp,
  kExpertDown,
};

[[nodiscard]] constexpr bool of_a_routed_expert(Role role) { return role >= Role::kExpertGate; }

}  // namespace nibble
