#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/source_config.h"

namespace nibble {

/// How the quantization_config of one quant_method is read when its checkpoint is a source.
struct SourceDialect {
  std::string_view name;  // quant_method
  SourceMethod method = SourceMethod::kNone;
  std::string_view codes;  // the tensors that hold them, for people
  Result<SourceConfig> (*parse)(const Json& config, const std::string& where);
};

[[nodiscard]] std::span<const SourceDialect> source_dialects();

/// The parsers. Fields that do not change the meaning of codes are passed over.
Result<SourceConfig> parse_compressed_tensors_source(const Json& config, const std::string& where);
Result<SourceConfig> parse_quark_source(const Json& config, const std::string& where);

/// Errors "WHERE: WHAT" of the parsers.
[[nodiscard]] Status corrupt_at(std::string_view where, std::string_view what);
[[nodiscard]] Status unsupported_at(std::string_view where, std::string_view what);
/// A field that is not there, null or {}.
[[nodiscard]] bool is_absent(const Json* value);

}  // namespace nibble
