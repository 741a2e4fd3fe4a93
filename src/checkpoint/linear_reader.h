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

/// The stored weights of one linear layer and the form of its activations.
struct LinearWeights {
  QuantTensor weight;  // [n, k]
  ActFormat act = ActFormat::kFloat;
};

/// The same where it lies in the mapped file.
struct MappedLinear {
  QuantView weight;  // [n, k]; valid as long as the reader and this object
  ActFormat act = ActFormat::kFloat;
  Buffer repacked;  // codes that the file stores in another form
  Buffer scales;    // likewise
};

/// Like read_linear_weights(), but without a copy, and without a look at the codes: NaN among FP8
/// codes is left to whoever packs them. Scales are checked.
Result<MappedLinear> map_linear_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        std::string_view module);

/// Reads the weights of a module ("model.layers.0.mlp.up_proj"), copying them out of the file. The
/// tensors that exist decide: X.weight_packed (int4), X.weight with X.weight_scale (int8, int4 in
/// bytes, fp8), words of Quark and GPTQ, or a plain X.weight in F32, F16 or BF16. The bias is not
/// read.
/// Errors name file and tensor: kNotFound (no such weights), kCorrupt (shapes that contradict, NaN,
/// infinite scales or codes out of range), kUnsupported (zero points, act-order, other layouts).
Result<LinearWeights> read_linear_weights(const CheckpointReader& reader,
                                          const QuantConfig& config,
                                          std::string_view module);

}  // namespace nibble
