#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "calibration/calibration_text.h"
#include "checkpoint/kv_sidecar.h"

namespace nibble {

struct KvCalibrationOptions {
  std::string model;  // folder or GGUF file
  CalibrationTextOptions text;
  std::optional<HeadForm> form;  // of all layers; none: in each what loses least
  int threads = 0;
  const std::atomic<bool>* stop = nullptr;  // becomes true when the run should end early
  std::function<void(int64_t done, int64_t layers)> progress;
};

/// Lets a model read a text, layer by layer, in the kernels that will run and over a cache that
/// keeps keys and values as they are; takes the mean of each channel of keys (after their rotation)
/// and of values; and computes the attention of the same queries over INT4 codes of each form, to
/// choose for keys and for values the one whose results differ least (squares summed over tokens
/// and heads; the other half centred and turned). Then writes all that beside the model
/// (kv_sidecar_path()). One layer is in memory; hidden states are in a nameless file there. Neither
/// the result nor the file depends on the threads. Source of centring: the mean of keys shifts all
/// scores of a query alike; where there are sinks, whose logits stay, nothing is centred.
/// Errors: those of check_kv_calibration(), read_model_text(), load_model() and write_kv_sidecar();
/// kCorrupt naming the layer whose keys, values or results are not finite; kCancelled when stopped.
Result<KvSidecar> calibrate_kv(const KvCalibrationOptions& options);

/// kUnsupported, naming the field, for a model with latent attention, whose cached rows are as they
/// are. Nothing for one that is not known, or cannot be read.
Status check_kv_calibration(const std::string& model);

}  // namespace nibble
