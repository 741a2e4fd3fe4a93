#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/dialect.h"
#include "quant/scheme.h"

namespace nibble {

/// The modules of a model that are stored in one scheme.
struct SchemeUse {
  QuantScheme scheme;
  /// Module names or "re:" patterns. May be empty for the only quantized scheme of a model: it then
  /// applies to every linear layer that is not ignored.
  std::vector<std::string> modules;
};

/// What the configuration says about the KV cache; weights do not depend on it.
enum class KvCacheScheme : uint8_t { kNone, kFp8 };

/// Accepts none and fp8.
Result<KvCacheScheme> parse_kv_cache_scheme(std::string_view name);

/// How a model is stored, as far as its quantization_config tells.
struct StoredQuantization {
  Dialect dialect = Dialect::kCompressedTensors;
  std::vector<SchemeUse> uses;      // unquantized schemes count as ignored
  std::vector<std::string> ignore;  // linear modules that are not quantized
  KvCacheScheme kv_cache = KvCacheScheme::kNone;
  Json transforms;  // transform_config; null: none
};

/// quantization_config for config.json; null when no scheme quantizes and there are no transforms.
/// kUnsupported, with the remedy, for what the dialect cannot say: a scheme, several schemes in one
/// model, patterns among `ignore`, a KV cache scheme, or transforms.
Result<Json> stored_config_json(const StoredQuantization& stored);

}  // namespace nibble
