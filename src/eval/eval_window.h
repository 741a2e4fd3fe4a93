#pragma once

#include <cstdint>
#include <vector>

namespace nibble {

/// Tokens that a model reads from an empty cache, and which of them are scored.
struct EvalWindow {
  std::vector<int32_t> tokens;
  int64_t first_scored = 1;  // tokens[first_scored ...] are, each given all before it

  [[nodiscard]] int64_t scored() const { return std::ssize(tokens) - first_scored; }
};

}  // namespace nibble
