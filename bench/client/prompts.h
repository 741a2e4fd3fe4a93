#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "text/tokenizer.h"

namespace nibble {

/// A prompt in one of its three forms.
struct Prompt {
  std::string text;          // empty: ids or messages
  std::vector<int32_t> ids;  // sent as they are
  Json messages;             // of a chat; an array, or null
  int64_t input_len = -1;    // tokens; -1: unknown
  int64_t output_len = 0;    // tokens to ask for
};

/// What --random-range-ratio R makes of a length L. kSglang: uniform in [L R, L], at least 1;
/// kVllm: uniform in [floor(L (1 - R)), ceil(L (1 + R))], at least 1.
enum class RangeSemantics : uint8_t { kSglang, kVllm };

struct LengthRange {
  int64_t low = 0;
  int64_t high = 0;  // inclusive
};
/// kInvalidArgument unless 0 <= ratio, <= 1 for kSglang and < 1 for kVllm.
Result<LengthRange> length_range(int64_t length, double ratio, RangeSemantics semantics);

struct PromptOptions {
  int64_t count = 0;
  uint64_t seed = 0;
  int64_t input_len = 1024;
  int64_t output_len = 128;
  int64_t prefix_len = 0;  // tokens that all prompts begin with, on top of input_len
  double range_ratio = 0;
  RangeSemantics semantics = RangeSemantics::kVllm;
  const Tokenizer* tokenizer = nullptr;  // absent: prompts are token ids below vocab_size
  int64_t vocab_size = 0;
  bool as_ids = false;       // send ids even with a tokenizer
  int64_t fixed_output = 0;  // of files: --output-len for every prompt; 0: what the file says
  std::string path;          // of files
};

/// Prompts of random tokens: each begins at another random place of the vocabulary without special
/// tokens and follows it from there, so that no two are alike. As text they are decoded, encoded
/// again and cut or filled up until the count is right; input_len is what it is in the end.
Result<std::vector<Prompt>> random_prompts(const PromptOptions& options);
/// The same lengths, filled with the prompts of a ShareGPT file, cut or repeated.
Result<std::vector<Prompt>> random_sharegpt_prompts(const PromptOptions& options);
/// Conversations of a ShareGPT file: its first turn is the prompt, the second says how long the
/// answer is. Shuffled; those below 4 tokens, prompts above 1024 and sums above 2048 are left out.
Result<std::vector<Prompt>> sharegpt_prompts(const PromptOptions& options);
/// JSONL with `prompt` or `messages`, and optionally `output_tokens`.
Result<std::vector<Prompt>> custom_prompts(const PromptOptions& options);

}  // namespace nibble
