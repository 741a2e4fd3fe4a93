#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/quant_config.h"

/// The dialect of vllm-project/compressed-tensors: how its quantization_config names our schemes.
namespace nibble::compressed_tensors {

inline constexpr std::string_view kMethod = "compressed-tensors";

/// quantization_config -> groups. Refuses (kUnsupported, naming the path of the field) unknown
/// fields, asymmetric or act-ordered weights, static activations and other formats.
Result<QuantConfig> parse_config(const Json& config, const std::string& where);

}  // namespace nibble::compressed_tensors
