#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "eval/eval_window.h"
#include "text/tokenizer.h"

namespace nibble {

/// How a text becomes windows, which published perplexities depend on; docs/evaluation.md has them
/// side by side.
enum class Protocol : uint8_t {
  kOurs,      // the text as it is, no special tokens, windows without overlap
  kGptq,      // blank lines emptied and lines joined by two newlines, the tokenizer's BOS in front
  kLlamaCpp,  // each window's first token is BOS, its second half is scored
  kLmEval,    // pages of WikiText, detokenized; every token is scored, given as much as fits
};

/// "ours", "gptq", "llama.cpp", "lm-eval".
[[nodiscard]] std::string_view protocol_name(Protocol protocol);
[[nodiscard]] std::vector<std::string> protocol_names();
/// kInvalidArgument lists the names.
Result<Protocol> parse_protocol(std::string_view name);

/// Tokens of a window where none are asked for: 512, with gptq 2048, with lm-eval the model's
/// context; never more than that.
[[nodiscard]] int64_t default_window(Protocol protocol, int64_t context);

/// A text, ready to be scored.
struct EvalText {
  std::vector<EvalWindow> windows;
  int64_t tokens = 0;  // of the text; not all need be scored
  int64_t bytes = 0;   // of the file
  int64_t words = 0;   // parts between white space, counted as lm-eval does

  [[nodiscard]] int64_t scored() const;
};

/// Tokenizes `text` and cuts it into windows of `window` tokens.
/// kInvalidArgument: fewer tokens than the protocol needs, naming both; no token to begin with.
Result<EvalText> plan_windows(std::string_view text,
                              const Tokenizer& tokenizer,
                              Protocol protocol,
                              int64_t window);

/// The text that GPTQ's and later papers score: lines keep their newline, those of white space
/// alone become empty, and all are joined by two newlines.
[[nodiscard]] std::string joined_lines(std::string_view text);

}  // namespace nibble
