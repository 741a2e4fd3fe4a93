#include "model/not_finite.h"

namespace nibble {

Status explain_not_finite(const Model& model) {
  const Status weights = model.check_weights();
  return make_error(
      StatusCode::kCorrupt, "the model's logits have a NaN or an infinity: {}",
      weights.ok() ? "all stored weights are finite, so its numbers overflow; they are damaged, or "
                     "config.json belongs to other weights"
                   : weights.message());
}

}  // namespace nibble
