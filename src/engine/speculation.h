#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace nibble {

/// Tokens that are proposed to follow a sequence, and verified in one step: by prompt lookup, which
/// finds where its last tokens stood before and proposes what followed them there, or by a model.
struct Speculation {
  int64_t tokens = 0;       // most that are proposed at a time; 0: none ever
  int64_t lookup_max = 5;   // last tokens that are looked for, as many of these as are found
  int64_t lookup_min = 5;   // fewer than these propose nothing
  std::string draft_model;  // folder of a model that proposes; "": prompt lookup does
};

/// Most rows of a step with proposals. On CPUs those of one tile of products, of which fewer take
/// about as long; on devices that sample tokens themselves more, whose steps take little longer.
inline constexpr int64_t kSpeculatedRows = 16;
inline constexpr int64_t kMostSpeculatedRows = 64;

/// Reads vLLM's --speculative-config: {"method": "ngram", "num_speculative_tokens": N,
/// "prompt_lookup_max": .., "prompt_lookup_min": ..} or {"method": "draft_model", "model": FOLDER,
/// "num_speculative_tokens": N}. kInvalidArgument names the member at fault, kUnsupported another
/// method.
Result<Speculation> parse_speculation(std::string_view json);

/// At most `most` tokens that may follow `tokens`: what followed the latest of the longest earlier
/// occurrences of their end, over and over if that is the end itself. Empty if there is none.
[[nodiscard]] std::vector<int32_t> look_up(std::span<const int32_t> tokens,
                                           const Speculation& options,
                                           int64_t most);

/// Whether look_up() may find something behind one token more.
[[nodiscard]] bool may_follow(std::span<const int32_t> tokens, const Speculation& options);

/// What became of proposals since start.
struct SpeculationStats {
  int64_t drafts = 0, draft_tokens = 0, accepted_tokens = 0;
  std::vector<int64_t> accepted_at;  // by place in the draft

  void count(int64_t proposed, int64_t accepted);
};

}  // namespace nibble
