#pragma once

#include <optional>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/dialect.h"
#include "checkpoint/quant_config_writer.h"
#include "quantizer/plan_checks.h"

namespace nibble {

/// The transform_config in a source's config.json, whose weights have it whatever they are rounded
/// to; null: none.
[[nodiscard]] Json source_transforms(const Json& config);

/// The quantization_config that describes these matrices, with the source's transforms; null when
/// nothing stays quantized and there are none. A matrix that stays quantized as the source has it
/// keeps the parameters that the source's configuration gives it.
///   dialect        of the schemes that matrices are encoded in; empty when none is
///   source_config  parsed config.json of the source
/// kUnsupported, with the remedy, for what the dialect cannot describe.
Result<Json> written_config(const std::vector<DecidedMatrix>& matrices,
                            std::optional<Dialect> dialect,
                            KvCacheScheme kv_cache,
                            const Json& source_config);

/// The shortest list of names and "re:" patterns for some modules of a model: numbers become
/// patterns wherever that names no module of `others`.
[[nodiscard]] std::vector<std::string> module_patterns(const std::vector<std::string>& modules,
                                                       const std::vector<std::string>& others);

}  // namespace nibble
