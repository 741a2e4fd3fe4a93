#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arch/config.h"
#include "base/status.h"
#include "text/tokenizer.h"

namespace nibble {

/// Which text a model is calibrated with, and how much of it.
struct CalibrationTextOptions {
  std::string path;      // plain text; *.jsonl: one object a line, whose "text" is taken
  int64_t windows = 64;  // at most
  int64_t length = 0;    // tokens of each; 0: 512, or the context of a model where that is shorter
  uint64_t seed = 0;     // chooses among windows where there are more
};

/// A text as the model sees it.
struct CalibrationText {
  std::string digest;                         // XXH3-128 of the file, in hexadecimal
  std::vector<std::vector<int32_t>> windows;  // in the order of the text, of equal lengths

  [[nodiscard]] int64_t tokens() const {
    return windows.empty() ? 0 : static_cast<int64_t>(windows.size() * windows.front().size());
  }
};

/// Reads a text, tokenizes it whole, without special tokens, cuts it into windows without overlap
/// and takes some of them. A text shorter than a window is one window.
/// Errors: kNotFound, kIo; kInvalidArgument for an empty or binary text, and with the line for one
/// of JSON that has no "text".
Result<CalibrationText> read_calibration_text(const CalibrationTextOptions& options,
                                              const Tokenizer& tokenizer);

/// The same with the tokenizer of a model folder; a length of 0 is the usual one.
/// kInvalidArgument for windows longer than the model's context, or tokens that it does not know.
Result<CalibrationText> read_model_text(const std::string& model,
                                        const ModelConfig& config,
                                        CalibrationTextOptions options);

/// kInvalidArgument, with what is needed, where a text says too little about matrices of so many
/// columns.
[[nodiscard]] Status check_tokens(const CalibrationText& text,
                                  const std::string& path,
                                  int64_t columns);
/// As many tokens as are better.
[[nodiscard]] int64_t tokens_wanted(int64_t columns);

}  // namespace nibble
