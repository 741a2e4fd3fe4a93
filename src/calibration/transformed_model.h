#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <string>

#include "base/json.h"
#include "base/status.h"
#include "calibration/model_transform.h"

namespace nibble {

/// A model folder to write: one that loads as any other does.
struct TransformedModel {
  std::string source;       // folder, or GGUF file
  std::string destination;  // folder to create, or to keep where its stamp is this one
  const ModelTransform* transform = nullptr;
  /// Modules whose weights are stored in F32: those that are rounded to codes later. All others
  /// are stored in the model's own type.
  std::set<std::string> precise;
  Json stamp;  // what the folder is made from: of a run that was interrupted it is found again
  int threads = 1;
  const std::atomic<bool>* stop = nullptr;
};

/// Whether a folder with this stamp is there already, whole.
[[nodiscard]] bool has_stamp(const std::string& folder, const Json& stamp);

/// Writes the source's weights, decoded and transformed, one matrix in memory at a time; quantized
/// ones become plain. The folder appears whole or not at all.
/// Errors: those of the readers, naming file and tensor; kCancelled, kIo, kResourceExhausted.
Status write_transformed_model(const TransformedModel& wanted);

}  // namespace nibble
