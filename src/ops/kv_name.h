#pragma once

#include <string_view>

#include "ops/kv.h"

namespace nibble {

/// What flags, metrics, reports and messages call a cache's type.
[[nodiscard]] constexpr std::string_view kv_code_name(KvCode code) {
  switch (code) {
    case KvCode::kF32:
      return "f32";
    case KvCode::kBf16:
      return "bf16";
    case KvCode::kInt8:
      return "int8";
    case KvCode::kInt4:
      return "int4";
    case KvCode::kFp8:
      return "fp8";
  }
  return "";
}

}  // namespace nibble
