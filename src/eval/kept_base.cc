#include "eval/kept_base.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "model/not_finite.h"

namespace nibble {

Result<KeptBase> KeptBase::run(LogitReader& reader, std::span<const EvalWindow> windows) {
  KeptBase kept(reader.model());
  const auto group = static_cast<size_t>(reader.options().sequences);
  for (size_t begin = 0; begin < windows.size(); begin += group) {
    const std::vector<Feed> feeds =
        feeds_of(windows.subspan(begin, std::min(group, windows.size() - begin)));
    NIBBLE_RETURN_IF_ERROR(reader.begin(feeds));
    for (LogitStep step = reader.next(); !step.rows.empty(); step = reader.next()) {
      kept.steps_.emplace_back(step.logits.begin(), step.logits.end());
    }
  }
  return kept;
}

Result<std::span<const float>> KeptBase::next(int64_t rows) {
  CHECK_LT(next_, steps_.size());
  const std::vector<float>& logits = steps_[next_++];
  CHECK_EQ(std::ssize(logits), rows * model_->config().vocab_size);
  return std::span<const float>(logits);
}

Status KeptBase::explain_not_finite() const {
  return nibble::explain_not_finite(*model_).with_context("the base");
}

}  // namespace nibble
