#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/linear_slots.h"
#include "checkpoint/quant_config.h"
#include "quant/quant_view.h"

namespace nibble {

/// The stored weights of one linear layer, where they lie in the mapped file, and the form of its
/// activations.
struct MappedLinear {
  QuantView weight;  // [n, k]; valid as long as the reader and this object
  ActFormat act = ActFormat::kFloat;
  Buffer repacked;  // codes that the file stores in another form
  Buffer scales;    // likewise
};

/// Finds the weights of a module ("model.layers.0.mlp.up_proj"). The tensors that exist decide:
/// X.weight_packed (int4, int8), X.weight with X.weight_scale (int8, int4 in bytes, fp8), words of
/// Quark and GPTQ, or a plain X.weight in F32, F16 or BF16. The bias is not read. Nothing is copied
/// but what the file stores in another form. Scales are checked; codes are not read: NaN among FP8
/// codes is left to whoever packs them. Errors name file and tensor: kNotFound (no such weights),
/// kCorrupt (shapes that contradict, NaN or infinite scales, INT4 codes in bytes out of range),
/// kUnsupported (zero points, act-order, other layouts).
Result<MappedLinear> map_linear_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        std::string_view module);

}  // namespace nibble
