#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/generation.h"
#include "text/tokenizer.h"

namespace nibble {

/// The member "logprobs" of a text completion: four arrays with an entry for each token of its
/// text. Tokens are named by their text, or "bytes:\\xe2\\x82" where that is a part of a character,
/// so that names differ.
class CompletionLogprobs final {
 public:
  /// `count`: alternatives of each token; below 0 there are no logprobs at all.
  CompletionLogprobs(const Tokenizer& tokenizer, int count)
      : tokenizer_(tokenizer), count_(count) {}

  /// The prompt's tokens; the first has null for what depends on a token before it.
  void add_prompt(const Choice& choice);
  /// The entries of the answer.
  void add_answer(const Choice& choice);
  /// Null where `count` was below 0.
  [[nodiscard]] Json json();

 private:
  void add(int32_t token, int64_t offset);
  void add_score(float logprob, const std::vector<TokenLogprob>& top);

  const Tokenizer& tokenizer_;
  const int count_;
  JsonArray tokens_, values_, tops_, offsets_;
};

/// The member "prompt_logprobs": for each prompt token null (the first) or an object from token id
/// to logprob, rank and text, of the token itself and of `count` most likely ones.
[[nodiscard]] Json prompt_logprobs_json(const Choice& choice,
                                        const Tokenizer& tokenizer,
                                        int count);

}  // namespace nibble
