#include "eval/base_rows.h"

#include <vector>

#include "base/check.h"
#include "model/not_finite.h"

namespace nibble {

Result<std::span<const float>> LiveBase::next(int64_t rows) {
  const LogitStep step = reader_.next();
  CHECK_EQ(std::ssize(step.rows), rows);
  return step.logits;
}

Status LiveBase::explain_not_finite() const {
  return nibble::explain_not_finite(reader_.model()).with_context("the base");
}

Digest digest_of_windows(std::span<const EvalWindow> windows) {
  std::vector<int64_t> numbers;
  for (const EvalWindow& window : windows) {
    numbers.push_back(std::ssize(window.tokens));
    numbers.push_back(window.first_scored);
    numbers.insert(numbers.end(), window.tokens.begin(), window.tokens.end());
  }
  return digest_of(std::as_bytes(std::span(numbers)));
}

}  // namespace nibble
