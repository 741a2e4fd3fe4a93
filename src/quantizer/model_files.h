#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Copies tokenizer, templates, licences and other small files of a model folder; not config.json,
/// weights, their index, hidden files or subfolders. Copies are flushed.
Status copy_model_files(const std::string& source, const std::string& destination);

/// config.json of `source` with every quantization_config, nested ones included, replaced by one at
/// the top.
Status write_config(const std::string& source,
                    const std::string& destination,
                    const Json& quantization_config);

}  // namespace nibble
