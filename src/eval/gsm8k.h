#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace nibble {

/// One problem of GSM8K. The reference solution ends in "#### " and the number.
struct GsmProblem {
  std::string question;
  std::string answer;
};

/// Reads JSONL with question and answer. kCorrupt naming the line: a field is missing, or the
/// answer has no number after "#### ".
///   limit: most problems; 0: all
Result<std::vector<GsmProblem>> read_gsm8k(const std::string& path, int64_t limit);

/// lm-eval's prompt: "Question: ...\nAnswer: SOLUTION\n\n" of each example, then the question.
[[nodiscard]] std::string gsm8k_prompt(std::span<const GsmProblem> examples,
                                       const GsmProblem& problem);
/// What ends an answer.
[[nodiscard]] std::vector<std::string> gsm8k_stops();

/// The number after the first "#### " of an answer.
[[nodiscard]] std::optional<std::string> strict_answer(std::string_view text);
/// The last number of an answer, dollar signs, commas and points included.
[[nodiscard]] std::optional<std::string> flexible_answer(std::string_view text);
/// Whether an extracted answer is the reference's: without commas, dollar signs, one full stop at
/// the end, what stands up to the last "#### ", and differences of case.
[[nodiscard]] bool equals_reference(const std::optional<std::string>& answer,
                                    std::string_view reference);

}  // namespace nibble
