#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/plan.h"

namespace nibble {

/// Copies tokenizer, templates, licences and other small files of a model folder; not config.json,
/// weights, their index, reports of a quantization, hidden files or subfolders. Copies are flushed
/// and replace what is there.
Status copy_model_files(const std::string& source, const std::string& destination);

/// config.json of `source` with every quantization_config, nested ones included, replaced by one at
/// the top; by none if that is null.
Status write_config(const std::string& source,
                    const std::string& destination,
                    const Json& quantization_config);

/// model.safetensors.index.json of a plan with several weight files; nothing for one.
Status write_weight_index(const QuantizePlan& plan, const std::string& folder);

}  // namespace nibble
