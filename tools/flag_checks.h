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

/// Accepts a number between `least` and `most`, never a NaN, which those of CLI11 pass.
[[nodiscard]] CLI::Validator number_between(double least, double most);
/// Accepts a finite number above 0.
[[nodiscard]] CLI::Validator positive_number();
/// Accepts a finite number of at least 0.
[[nodiscard]] CLI::Validator number_of_at_least_0();

/// Refuses an empty text; the message says `why`.
[[nodiscard]] CLI::Validator not_empty(const std::string& why);

}  // namespace nibble
