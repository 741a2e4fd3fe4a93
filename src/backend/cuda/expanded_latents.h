#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/expanded_plan.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/tensor_map.h"
#include "backend/expanded_latent.h"
#include "backend/step.h"

namespace nibble::cuda {

/// Latent attention in its expanded form, piece by piece of what the cache holds; the memory for a
/// piece, which all layers share. On Hopper alone, and for heads of one form (expanded.h).
class ExpandedLatents final {
 public:
  struct Sizes {
    int64_t heads = 0;         // of a layer, at most
    int32_t piece_tokens = 0;  // a multiple of kExpandedTile
    int64_t sequences = 0;     // of a step, at most
  };

  /// For steps of these limits; no heads where the device or the model expands none.
  [[nodiscard]] static Sizes sizes(const StepLimits& limits);
  [[nodiscard]] static int64_t bytes(const Sizes& sizes);
  /// kResourceExhausted; kUnavailable where the driver makes no tensor maps.
  static Result<std::unique_ptr<ExpandedLatents>> create(const Sizes& sizes);

  /// Whether it computes a layer of this form.
  [[nodiscard]] bool takes(const ExpandedLatentArgs& args) const;
  /// Of a layer that it takes: attention of sequences of the step, whose rows are in the cache.
  void run(const ExpandedLatentArgs& args,
           std::span<const ExpandedSequence> sequences,
           const StepMetadata& step,
           cudaStream_t stream);
  /// The lengths of a step's sequences, but 0 for `left_out`: what plan_latent() is given then.
  const int32_t* lengths_without(std::span<const int32_t> left_out,
                                 const StepMetadata& step,
                                 cudaStream_t stream);

 private:
  ExpandedLatents(const Sizes& sizes, const TensorMaps& maps, DeviceBuffer memory);

  [[nodiscard]] ExpandedMaps map_pieces(int64_t heads) const;
  [[nodiscard]] Activations at(size_t place) const {
    return {memory_.as<std::byte>() + place, DType::kBF16};
  }

  Sizes sizes_;
  TensorMaps tensor_maps_;
  DeviceBuffer memory_;
  // Places in it: of a piece [piece_tokens, ...] each, and [sequences].
  size_t latents_ = 0, rotated_ = 0, keys_ = 0, values_ = 0, lengths_ = 0;
};

}  // namespace nibble::cuda
