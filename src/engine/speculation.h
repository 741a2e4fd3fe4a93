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

/// Most rows of a step with proposals: those of one tile of products on CPUs, of which fewer take
/// about as long.
inline constexpr int64_t kSpeculatedRows = 16;

/// Reads vLLM's --speculative-config: {"method": "ngram", "num_speculative_tokens": N,
/// "prompt_lookup_max": .., "prompt_lookup_min": ..} or {"method": "draft_model", "model": FOLDER,
/// "num_speculative_tokens": N}. kInvalidArgument names the member at fault, kUnsupported another
/// method.
Result<Speculation> parse_speculation(std::string_view json);

/// Why a device that samples tokens itself takes no speculation: kUnsupported.
Status no_speculation();

/// At most `most` tokens that may follow `tokens`: what followed the latest of the longest earlier
/// occurrences of their end, over and over if that is the end itself. Empty if there is none.
[[nodiscard]] std::vector<int32_t> look_up(std::span<const int32_t> tokens,
                                           const Speculation& options,
                                           int64_t most);

/// How many tokens to propose for one sequence, learnt from what became of those before: as many as
/// asked for where all are right, fewer and more seldom where they are not.
class DraftLength final {
 public:
  /// Tokens to propose now; counts the tokens of the sequence by its calls.
  [[nodiscard]] int64_t next(const Speculation& options);
  void learn(const Speculation& options, int64_t proposed, int64_t accepted);

 private:
  static constexpr int64_t kFirstPause = 4;
  static constexpr int64_t kLongestPause = 128;

  int64_t length_ = 0;  // 0: nothing is known yet
  int64_t pause_ = 0;   // tokens left without a proposal
  int64_t next_pause_ = kFirstPause;
};

/// What became of proposals since start.
struct SpeculationStats {
  int64_t drafts = 0, draft_tokens = 0, accepted_tokens = 0;
  std::vector<int64_t> accepted_at;  // by place in the draft

  void count(int64_t proposed, int64_t accepted);
};

}  // namespace nibble
