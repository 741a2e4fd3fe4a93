#include "checkpoint/quant_config_writer.h"

#include <algorithm>

#include "checkpoint/dialects/dialects.h"

namespace nibble {
namespace {

/// Moves the modules of unquantized schemes to `ignore`.
StoredQuantization quantized_part(const StoredQuantization& stored) {
  StoredQuantization part = stored;
  part.uses.clear();
  for (const SchemeUse& use : stored.uses) {
    if (use.scheme.weight.quantized()) {
      part.uses.push_back(use);
    } else {
      part.ignore.insert(part.ignore.end(), use.modules.begin(), use.modules.end());
    }
  }
  return part;
}

Status check_single(const StoredQuantization& stored) {
  const std::string_view name = dialect_name(stored.dialect);
  if (stored.uses.size() > 1) {
    return make_error(StatusCode::kUnsupported,
                      "format {} stores one scheme per model, not both {} and {}; choose --format "
                      "{}",
                      name, stored.uses[0].scheme.name, stored.uses[1].scheme.name,
                      dialect_name(Dialect::kCompressedTensors));
  }
  if (stored.kv_cache != KvCacheScheme::kNone) {
    return make_error(StatusCode::kUnsupported,
                      "format {} cannot announce a KV cache scheme alone; leave --kv-cache-scheme "
                      "out or choose --format {}",
                      name, dialect_name(Dialect::kCompressedTensors));
  }
  if (!stored.transforms.is_null()) {
    return make_error(StatusCode::kUnsupported,
                      "format {} cannot say that inputs are turned while the model runs; choose "
                      "--format {}",
                      name, dialect_name(Dialect::kCompressedTensors));
  }
  for (const std::string& module : stored.ignore) {
    if (module.rfind("re:", 0) == 0) {
      return make_error(StatusCode::kUnsupported,
                        "format {} lists modules by name, not by pattern \"{}\"", name, module);
    }
  }
  return {};
}

}  // namespace

Result<KvCacheScheme> parse_kv_cache_scheme(std::string_view name) {
  if (name == "none") {
    return KvCacheScheme::kNone;
  }
  if (name == "fp8") {
    return KvCacheScheme::kFp8;
  }
  return make_error(StatusCode::kInvalidArgument,
                    "unknown KV cache scheme \"{}\"; choose none or fp8", name);
}

Result<Json> stored_config_json(const StoredQuantization& stored) {
  const StoredQuantization part = quantized_part(stored);
  if (part.uses.empty() && part.transforms.is_null()) {
    return Json();
  }
  for (const SchemeUse& use : part.uses) {
    NIBBLE_RETURN_IF_ERROR(check_dialect(part.dialect, use.scheme));
    if (part.uses.size() > 1 && use.modules.empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "scheme {} is one of several of the model and names no modules",
                        use.scheme.name);
    }
  }
  if (part.dialect != Dialect::kCompressedTensors) {
    NIBBLE_RETURN_IF_ERROR(check_single(part));
  }
  const auto rows = all_dialects();
  const auto found = std::ranges::find_if(
      rows, [&](const DialectRow* row) { return row->dialect == part.dialect; });
  return (*found)->write(part);
}

}  // namespace nibble
