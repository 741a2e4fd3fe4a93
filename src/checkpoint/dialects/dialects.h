#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/dialect.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/quant_config_writer.h"

namespace nibble {

/// One dialect: how its quantization_config is read and, where `write` is there, written.
struct DialectRow {
  std::string_view name;  // quant_method
  Dialect dialect = Dialect::kNone;
  std::string_view codes;  // the tensors that hold them, for people
  /// kUnsupported names a field or value that would change the meaning of what is stored and that
  /// is not known; fields that do not are passed over.
  Result<QuantConfig> (*read)(const Json& config, const std::string& where);
  bool (*stores)(const QuantScheme& scheme) = nullptr;  // which quantized schemes it can say
  Json (*write)(const StoredQuantization& stored) = nullptr;
};

extern const DialectRow kCompressedTensorsDialect;
extern const DialectRow kGptqDialect;
extern const DialectRow kAwqDialect;
extern const DialectRow kFp8Dialect;
extern const DialectRow kMxfp4Dialect;
extern const DialectRow kQuarkDialect;
extern const DialectRow kModelOptDialect;

[[nodiscard]] std::span<const DialectRow* const> all_dialects();

/// Errors "WHERE: WHAT".
[[nodiscard]] Status corrupt_at(std::string_view where, std::string_view what);
[[nodiscard]] Status unsupported_at(std::string_view where, std::string_view what);
/// A field that is not there, null or {}.
[[nodiscard]] bool is_absent(const Json* value);
/// kCorrupt unless `object` is one; kUnsupported for a field that is not in `known`.
Status check_fields(const Json& object,
                    std::span<const std::string_view> known,
                    const std::string& where);
/// Two positive integers, the rows and columns of a block. `field` names the value.
Status read_block(const Json* value,
                  std::string_view field,
                  const std::string& where,
                  QuantGroup& group);
/// A config of one group that all quantized modules belong to.
[[nodiscard]] QuantConfig one_group(Dialect dialect, QuantGroup group, const std::string& where);

inline constexpr std::string_view kEveryModule = "glob:*";
inline constexpr int64_t kMostGroup = 1 << 20;  // sizes of groups beyond are errors

}  // namespace nibble
