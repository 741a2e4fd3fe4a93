#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/dialect.h"
#include "core/dtype.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble {

/// One tensor that stores part of a linear layer.
struct TensorSlot {
  std::string suffix;  // "weight_packed"
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
};

/// Whether INT8 codes are stored four in a word, as code + 128, rows padded to whole words with 0:
/// the only form that vLLM and SGLang take without activations to quantize.
bool stores_int8_in_words(const QuantScheme& scheme);
/// What turns a code into code + 128 and back, by exclusive or.
inline constexpr std::byte kInt8WordOffset{0x80};

/// The tensors that store a layer [n, k] of this scheme in a dialect that can (check_dialect()), in
/// the order codes, scales, zero points, shape.
std::vector<TensorSlot> linear_slots(const QuantScheme& scheme,
                                     Dialect dialect,
                                     int64_t n,
                                     int64_t k);
/// The same as compressed-tensors stores it.
std::vector<TensorSlot> linear_slots(const QuantScheme& scheme, int64_t n, int64_t k);
/// File bytes of one slot of the compressed-tensors form for `weight`, which has a scale per
/// channel or group and no zero points. Scales must be representable in the slot's type.
Result<std::vector<std::byte>> slot_bytes(const TensorSlot& slot, const QuantTensor& weight);

}  // namespace nibble
