#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/source_config.h"
#include "quant/scheme.h"

namespace nibble {

/// One entry of config_groups.
struct QuantGroup {
  std::vector<std::string> targets;  // class name, module name, or "re:" pattern
  WeightFormat weight;
  ActFormat act = ActFormat::kFloat;
};

/// The quantization_config of config.json, as far as it says how to read codes. Which modules are
/// quantized is decided by the tensors that exist, never by this.
struct QuantConfig {
  std::vector<QuantGroup> groups;   // empty: nothing is quantized
  std::vector<std::string> ignore;  // as written
  SourceConfig source;              // of other methods than compressed-tensors: their own words

  /// The group whose parameters apply to a module that is stored quantized: exact name or "re:"
  /// pattern first, then the class "Linear". nullptr when none matches.
  [[nodiscard]] const QuantGroup* group_for(std::string_view module) const;
  /// True when a module is in `ignore` (by name, pattern or class).
  [[nodiscard]] bool ignores(std::string_view module) const;
};

/// Reads quantization_config from a parsed config.json: at the top, else under text_config; an
/// absent one gives an empty QuantConfig. Runs: compressed-tensors, Quark's W4A8, symmetric GPTQ
/// and FP8 with a scale per tensor or channel. `where` names the file. kUnsupported names the field
/// or value that this build cannot honour, an unknown field of compressed-tensors included.
Result<QuantConfig> parse_quant_config(const Json& model_config, std::string_view where);
/// The same from the config.json beside a checkpoint; for a single file or a folder without
/// config.json it is empty. kCorrupt when it announces quantized weights and there are none.
Result<QuantConfig> load_quant_config(const CheckpointReader& reader);

/// quantization_config of compressed-tensors for a model whose linear layers, except `ignore`, have
/// this scheme, which must be quantized.
Json quant_config_json(const QuantScheme& scheme, const std::vector<std::string>& ignore);

/// "re:PATTERN" matches like Python's re.match (anchored at the start only); otherwise the exact
/// module name. A pattern that does not compile is kInvalidArgument.
Result<bool> matches_module(std::string_view pattern, std::string_view module);

}  // namespace nibble
