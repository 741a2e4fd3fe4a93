#pragma once

#include "base/json.h"
#include "checkpoint/quant_config_writer.h"

/// quantization_config in the words of each dialect, for schemes that it can store (checked by the
/// caller, stored_config_json()).
namespace nibble {

namespace compressed_tensors {
/// One group per scheme; "mixed-precision" when their formats differ.
Json config_json(const StoredQuantization& stored);
}  // namespace compressed_tensors

namespace quark {
/// FP8 then INT4 weights (two entries), activations FP8 per token.
Json config_json(const StoredQuantization& stored);
}  // namespace quark

namespace fp8_block {
/// DeepSeek's FP8 blocks.
Json config_json(const StoredQuantization& stored);
}  // namespace fp8_block

}  // namespace nibble
