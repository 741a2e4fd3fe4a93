#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace nibble {

/// What steps are made for, where one thing costs another: the first token of a request, the time
/// between the tokens of those that run, or tokens of all together.
enum class Preference : uint8_t { kTtft, kTpot, kThroughput };

/// What --prefer takes.
[[nodiscard]] std::vector<std::string> preference_names();
[[nodiscard]] std::string_view preference_name(Preference preference);
/// kInvalidArgument lists the names.
Result<Preference> parse_preference(std::string_view name);

/// Where steps are computed, as far as their sizes depend on it.
enum class StepDevice : uint8_t { kCpu, kGpu };

/// How large steps become.
struct StepSizes {
  int64_t max_num_seqs = 0;
  int64_t max_num_batched_tokens = 0;
  int64_t max_mixed_prefill = 0;  // tokens of prompts in a step in which others decode; may be
                                  // more than it has
};

/// The sizes of EngineOptions that are left open.
[[nodiscard]] StepSizes preferred_sizes(Preference preference, StepDevice device);

/// Sizes of a GPU are halved, tokens first, as long as their scratch memory is too large and they
/// are above those of CPUs. False when there is nothing to halve.
[[nodiscard]] bool halve(StepSizes& sizes);

}  // namespace nibble
