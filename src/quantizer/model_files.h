#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/plan.h"

namespace nibble {

/// Names of the small files that a quantized model keeps: tokenizer, templates, licences; not
/// config.json, weights, their index, what tells of an earlier quantization, hidden files or
/// subfolders. Sorted. Of a GGUF file those that its metadata makes up for.
Result<std::vector<std::string>> list_model_files(const std::string& folder);

/// Whether these files can be opened: what is no regular file is found out at the start, not at the
/// end of a long run.
Status check_model_files(const std::string& folder);

/// One of them.
Result<std::string> read_model_file(const std::string& folder, const std::string& name);

/// Copies these files. Copies are flushed and replace what is there.
Status copy_model_files(const std::string& source, const std::string& destination);

/// config.json of a folder, an object.
Result<Json> read_config(const std::string& folder);
/// config.json of `source` with every quantization_config, nested ones included, replaced by the
/// plan's at the top; by none if that is null. With the plan's own head it is not tied.
Status write_config(const std::string& source,
                    const std::string& destination,
                    const QuantizePlan& plan);

/// model.safetensors.index.json of a plan with several weight files; nothing for one.
Status write_weight_index(const QuantizePlan& plan, const std::string& folder);

}  // namespace nibble
