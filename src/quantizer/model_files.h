#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/plan.h"

namespace nibble {

using ModelFileVisitor =
    std::function<Status(const std::string& name, std::span<const std::byte> bytes)>;

/// Visits the small files that a quantized model keeps: tokenizer, templates, licences; not
/// config.json, weights, their index, what tells of an earlier quantization, hidden files or
/// subfolders. Sorted by name. Of a GGUF file those that its metadata makes up for. The first error
/// of `visit` ends the visits.
Status visit_model_files(const std::string& model, const ModelFileVisitor& visit);

/// Whether these files can be opened: what is no regular file is found out at the start, not at the
/// end of a long run.
Status check_model_files(const std::string& model);

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
