#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Which program's conventions a quantized checkpoint follows.
enum class SourceMethod : uint8_t {
  kNone,
  kCompressedTensors,
  kGptq,
  kAwq,
  kFp8,  // DeepSeek and transformers
  kMxfp4,
  kQuark,
  kModelOpt,
};

/// How the codes of some modules are to be read. The numbers of scales follow from their shapes
/// where `strategy` leaves it open.
struct SourceGroup {
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
  std::string where;         // "config.json: quantization_config.config_groups.group_0"
};

/// The quantization_config of a source, as far as it says how to read what is stored.
struct SourceConfig {
  SourceMethod method = SourceMethod::kNone;
  std::vector<SourceGroup> groups;  // the first that matches by name, then by class
  bool gptq_v2 = false;             // zero points are stored as they are
  bool quark_reorder = true;        // export.pack_method
  std::string where;                // "config.json: quantization_config"
  bool beside = false;              // in a file of its own, which only some programs read

  /// The group of a module that is stored quantized; nullptr when none matches.
  [[nodiscard]] const SourceGroup* group_for(std::string_view module) const;
};

/// From the top of config.json, else from its text_config, else from hf_quant_config.json or
/// quantize_config.json in `folder`. kNone when there is nothing. kUnsupported names the field or
/// value that would change the meaning of codes and is not known.
Result<SourceConfig> read_source_config(const Json& config, const std::string& folder);

/// One quantization_config object; `where` names it.
Result<SourceConfig> parse_source_config(const Json& config, const std::string& where);

}  // namespace nibble
