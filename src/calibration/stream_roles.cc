#include "calibration/stream_roles.h"

namespace nibble {

std::optional<Role> norm_before(Role role) {
  switch (role) {
    case Role::kHead:
      return Role::kFinalNorm;
    case Role::kQuery:
    case Role::kKey:
    case Role::kValue:
    case Role::kQueryDown:
    case Role::kLatentDown:
      return Role::kAttentionNorm;
    case Role::kGate:
    case Role::kUp:
    case Role::kRouter:
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kSharedExpertGate:
    case Role::kExpertGate:
    case Role::kExpertUp:
      return Role::kMlpNorm;
    default:
      return std::nullopt;
  }
}

bool adds_to_stream(Role role) {
  return role == Role::kAttentionOutput || role == Role::kDown || role == Role::kSharedDown ||
         role == Role::kExpertDown;
}

bool is_norm_of_stream(Role role) {
  return role == Role::kAttentionNorm || role == Role::kMlpNorm || role == Role::kFinalNorm;
}

}  // namespace nibble
