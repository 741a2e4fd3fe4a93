#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "arch/family.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/source_coded.h"
#include "quant/act_spec.h"
#include "quant/quant_view.h"

namespace nibble {

/// The stored weights of one linear layer in the form that kernels take, in the mapped file where
/// they lie so, and the form of its activations.
struct MappedLinear {
  QuantView weight;  // [n, k]; valid as long as the reader and this object
  ActSpec act;
  Buffer codes;  // those of the view that the file stores in another form
  Buffer scales;
  Buffer zeros;
  Buffer minimums;
  std::vector<const TensorInfo*> tensors;  // that it was read from
  std::string dropped;  // what the file wants of activations and is left out; empty: nothing
  std::string decoded;  // the GGUF type of which BF16 was made; empty: none
};

/// Whether products take weights of a format with k input channels; null: all.
using RunsFormat = std::function<bool(const WeightFormat& format, int64_t k)>;

/// Finds the weights of a module ("model.layers.0.mlp.up_proj"), in every form that
/// docs/formats.md lists as read; the tensors that exist decide. The bias is not read. Scales and
/// zero points are checked; codes are not read where they can stay in the file: NaN among FP8 codes
/// is left to whoever packs them. Columns that lie out of the order of their groups (act-order) are
/// put into it, and so must be the activations: ActSpec::columns. Errors name file and tensor:
/// kNotFound (no such weights), kCorrupt (shapes that contradict, NaN or infinite scales, 4-bit
/// codes in bytes out of range), kUnsupported (forms of activations that no product computes).
/// `runs` says which formats products take: what GGUF files hold in others is decoded to BF16.
Result<MappedLinear> map_linear_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        const std::string& module,
                                        const RunsFormat& runs = nullptr);

/// The same of one projection of a routed expert, "model.layers.0.mlp.experts.3.up_proj", which may
/// lie in a tensor of all experts: gpt-oss's blocks of MXFP4, or numbers in the layout that
/// `family` tells; then hidden_size says which of its axes is which. Of numbers that lie column by
/// column a copy is made.
struct ExpertOwner {
  const Family* family = nullptr;
  int64_t hidden_size = 0;
  RunsFormat runs = nullptr;  // as for map_linear_weights()
};
Result<MappedLinear> map_expert_weights(const CheckpointReader& reader,
                                        const QuantConfig& config,
                                        const std::string& module,
                                        const ExpertOwner& owner);

/// The same of a matrix whose facts are known, but for its activations.
Result<MappedLinear> map_coded(const CheckpointReader& reader, const CodedFacts& facts);

}  // namespace nibble
