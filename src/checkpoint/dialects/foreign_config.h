#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/quant_config.h"

namespace nibble {

/// A quantization_config of another method than compressed-tensors, as far as models stored so run:
/// Quark's FP8 and INT4 stages (their activations become INT8 per token), symmetric GPTQ, FP8 with
/// dynamic activations. Otherwise kUnsupported with the remedy: to quantize the checkpoint again.
Result<QuantConfig> parse_foreign_config(const Json& config, const std::string& where);

}  // namespace nibble
