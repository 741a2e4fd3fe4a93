#pragma once

#include "base/status.h"
#include "model/model.h"

namespace nibble {

/// kCorrupt: why a model's logits have a NaN or an infinity. Names the damaged weight if there is
/// one; for that the whole checkpoint is read, which takes as long as loading it.
[[nodiscard]] Status explain_not_finite(const Model& model);

}  // namespace nibble
