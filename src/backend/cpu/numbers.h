#pragma once

#include "backend/cpu/attention_task.h"
#include "base/check.h"
#include "ops/activations.h"

namespace nibble::cpu {

// Activations as kernels take them.

inline Element element_of(DType type) {
  CHECK(type == DType::kF32 || type == DType::kBF16);
  return type == DType::kF32 ? Element::kF32 : Element::kBf16;
}
inline Numbers numbers_of(Activations rows) { return {rows.data, element_of(rows.type)}; }
inline ConstNumbers numbers_of(ConstActivations rows) { return {rows.data, element_of(rows.type)}; }

}  // namespace nibble::cpu
