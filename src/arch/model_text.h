#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Whether a model says what it is: a folder with config.json, or a GGUF file.
[[nodiscard]] bool has_config(const std::string& model);

/// config.json of a model, an object: of a folder the file, of a GGUF file what its metadata says.
/// kCorrupt for what is no JSON object; kNotFound.
Result<Json> read_config_json(const std::string& model);

/// kNotFound, with what to give, unless `model` is a folder or a GGUF file.
Status check_is_model(const std::string& model);

}  // namespace nibble
