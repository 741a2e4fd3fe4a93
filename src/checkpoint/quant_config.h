#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/dialect.h"
#include "checkpoint/turned_inputs.h"
#include "quant/scheme.h"

namespace nibble {

/// How the inputs of modules enter their products, as a config says it.
struct StoredActivations {
  enum class Scale : uint8_t { kDynamic, kStatic };  // made of each row, or stored: "input_scale"
  ActFormat format = ActFormat::kFloat;
  Scale scale = Scale::kDynamic;
  std::string unknown;  // what the config wants and no product computes; empty: nothing
  std::string where;  // "config.json: quantization_config.config_groups.group_0.input_activations"
  bool gathered = false;  // in the order that a sidecar tells (checkpoint/fmpq_sidecar.h)
  std::string dropped;    // what the config wants and products leave out, being more exact without
};

/// How the codes of some modules are to be read, and what their activations are rounded to. The
/// numbers of scales follow from their shapes where `strategy` leaves it open.
struct QuantGroup {
  enum class Number : uint8_t { kInt, kUint, kFloat };
  enum class Strategy : uint8_t { kTensor, kChannel, kGroup, kBlock };

  std::vector<std::string> targets;  // module, "re:" pattern, "glob:" pattern or a class
  Number number = Number::kInt;
  int64_t bits = 0;
  bool symmetric = true;
  Strategy strategy = Strategy::kTensor;
  int64_t group_size = 0;  // kGroup; -1: all columns
  int64_t block_rows = 0;  // kBlock
  int64_t block_columns = 0;
  bool progressive = false;  // Quark: codes of codes; scales multiply each other
  StoredActivations activations;
  std::string where;  // "config.json: quantization_config.config_groups.group_0"
};

/// The quantization_config of a model: how to read what is stored. Which modules are quantized is
/// decided by the tensors that exist, never by this.
struct QuantConfig {
  Dialect dialect = Dialect::kNone;
  std::vector<QuantGroup> groups;    // empty: nothing is quantized
  std::vector<std::string> ignore;   // of compressed-tensors, as written
  std::vector<TurnedInputs> turned;  // of compressed-tensors
  bool gptq_v2 = false;              // zero points are stored as they are
  bool quark_reorder = true;         // export.pack_method
  std::string where;                 // "config.json: quantization_config"
  bool beside = false;               // in a file of its own, which only some programs read

  /// The group of a module that is stored quantized: the first that names it, by exact name or
  /// pattern, else the first that targets the class "Linear". nullptr when none matches.
  [[nodiscard]] const QuantGroup* group_for(std::string_view module) const;
  /// True when a module is in `ignore` (by name, pattern or class).
  [[nodiscard]] bool ignores(std::string_view module) const;
};

/// The scheme that a group describes, without a name where the table has none for it.
[[nodiscard]] QuantScheme scheme_of(const QuantGroup& group);

/// Reads quantization_config: from the top of config.json, else from its text_config, else from
/// hf_quant_config.json or quantize_config.json in `folder`. An absent one gives kNone.
/// kUnsupported names the field or value that would change the meaning of what is stored and is
/// not known.
Result<QuantConfig> read_quant_config(const Json& config, const std::string& folder);
/// The same from the config.json beside a checkpoint; for a single file or a folder without
/// config.json it is empty. kCorrupt when it announces quantized weights and there are none.
Result<QuantConfig> load_quant_config(const CheckpointReader& reader);
/// One quantization_config object; `where` names it.
Result<QuantConfig> parse_quant_config(const Json& config, const std::string& where);

/// quantization_config of compressed-tensors for a model whose linear layers, except `ignore`, have
/// this scheme, which must be quantized.
Json quant_config_json(const QuantScheme& scheme, const std::vector<std::string>& ignore);

/// "re:PATTERN" matches like Python's re.match (anchored at the start only); otherwise the exact
/// module name. A pattern that does not compile is kInvalidArgument.
Result<bool> matches_module(std::string_view pattern, std::string_view module);

}  // namespace nibble
