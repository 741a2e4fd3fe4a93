#pragma once

#include <optional>

#include "arch/role.h"

namespace nibble {

// What the roles of a decoder's tensors have to do with the residual stream.

/// The norm in front of a matrix whose columns are channels of the stream.
[[nodiscard]] std::optional<Role> norm_before(Role role);
/// Whether a matrix's rows, and its bias, are added to the stream.
[[nodiscard]] bool adds_to_stream(Role role);
[[nodiscard]] bool is_norm_of_stream(Role role);

}  // namespace nibble
