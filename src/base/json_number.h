#pragma once

#include "base/json.h"

namespace nibble {

/// The shortest decimal number that reads back as x, which is finite.
[[nodiscard]] Json shortest_number(float x);

}  // namespace nibble
