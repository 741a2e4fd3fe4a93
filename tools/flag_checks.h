#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include <CLI/CLI.hpp>

namespace nibble {

constexpr int64_t kMostThreads = 4096;

/// Accepts a whole number between `least` and `most`; the message of a refusal names both. The
/// checks of CLI11 pass numbers that do not fit their type and print limits of 300 digits.
[[nodiscard]] CLI::Validator whole_number(int64_t least,
                                          int64_t most = std::numeric_limits<int64_t>::max());

/// Refuses an empty text; the message says `why`.
[[nodiscard]] CLI::Validator not_empty(const std::string& why);

}  // namespace nibble
