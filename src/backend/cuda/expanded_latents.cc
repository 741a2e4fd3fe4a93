#include "backend/cuda/expanded_latents.h"

#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/latent_plans.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kRowDim = kExpandedRank + kExpandedRope;

/// Whether gather_latents() reads a cache of this format.
bool is_gathered(KvCode code) {
  using enum KvCode;
  return code == kBf16 || code == kFp8 || code == kInt8 || code == kInt4;
}

}  // namespace

ExpandedLatents::Sizes ExpandedLatents::sizes(const StepLimits& limits) {
  const bool known = limits.latent_row == kRowDim && limits.latent_key == kExpandedNope &&
                     limits.latent_value == kExpandedValue;
  const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                      device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  if (limits.latent_heads == 0 || !known || !hopper) {
    return {};
  }
  return {.heads = limits.latent_heads,
          .piece_tokens = expanded_piece_tokens(limits.latent_heads, limits.positions),
          .sequences = limits.sequences};
}

int64_t ExpandedLatents::bytes(const Sizes& sizes) {
  constexpr int64_t kBetween = 5 * 256;  // places are aligned
  return sizes.heads == 0 ? 0
                          : sizes.piece_tokens * expanded_token_bytes(sizes.heads) +
                                sizes.sequences * int64_t{sizeof(int32_t)} + kBetween;
}

Result<std::unique_ptr<ExpandedLatents>> ExpandedLatents::create(const Sizes& sizes) {
  NIBBLE_ASSIGN_OR_RETURN(const TensorMaps maps, TensorMaps::find());
  NIBBLE_ASSIGN_OR_RETURN(
      DeviceBuffer memory,
      allocate_device(static_cast<size_t>(bytes(sizes)), "keys and values of latent attention"));
  return std::unique_ptr<ExpandedLatents>(new ExpandedLatents(sizes, maps, std::move(memory)));
}

ExpandedLatents::ExpandedLatents(const Sizes& sizes, const TensorMaps& maps, DeviceBuffer memory)
    : sizes_(sizes), tensor_maps_(maps), memory_(std::move(memory)) {
  size_t end = 0;
  const auto take = [&](int64_t numbers) {
    return place(end, static_cast<size_t>(sizes.piece_tokens * numbers) * 2);
  };
  latents_ = take(kExpandedRank);
  rotated_ = take(kExpandedRope);
  keys_ = take(sizes.heads * kExpandedNope);
  values_ = take(sizes.heads * kExpandedValue);
  lengths_ = place(end, static_cast<size_t>(sizes.sequences) * sizeof(int32_t));
  CHECK_LE(end, memory_.size());
}

bool ExpandedLatents::takes(const ExpandedLatentArgs& args) const {
  return args.heads <= sizes_.heads && args.nope_dim == kExpandedNope &&
         args.value_dim == kExpandedValue && is_gathered(args.kv.code) &&
         args.kv.head_dim == kRowDim && args.kv.latent_rank == kExpandedRank &&
         args.q.type == DType::kBF16 && args.out.type == DType::kBF16 && args.q_stride % 8 == 0 &&
         args.keys->has_transposed();
}

ExpandedMaps ExpandedLatents::map_pieces(int64_t heads) const {
  ExpandedMaps maps;
  const auto map = [&](size_t place, int64_t columns, int panels, CUtensorMap& to) {
    CHECK(tensor_maps_.map_bf16(at(place).data, sizes_.piece_tokens, columns, kExpandedTile, panels,
                                to));
  };
  map(keys_, heads * kExpandedNope, 2, maps.keys);
  map(rotated_, kExpandedRope, 1, maps.rotated);
  map(values_, heads * kExpandedValue, 2, maps.values);
  return maps;
}

void ExpandedLatents::run(const ExpandedLatentArgs& args,
                          std::span<const ExpandedSequence> sequences,
                          const StepMetadata& step,
                          cudaStream_t stream) {
  CHECK(takes(args));
  const ExpandedMaps maps = map_pieces(args.heads);
  for (const ExpandedPiece& piece : cut_into_pieces(sequences, sizes_.piece_tokens)) {
    must(gather_latents({.shape = latent_shape_of(args.kv),
                         .step = step,
                         .piece = &piece,
                         .pages = args.kv.pages,
                         .latents = at(latents_).data,
                         .rotated = at(rotated_).data},
                        {stream}),
         "gathering latents");
    const HeadsArgs latents{
        .x = at(latents_), .x_stride = kExpandedRank, .x_head = 0, .m = piece.tokens};
    HeadsArgs keys = latents;
    keys.y = at(keys_);
    keys.y_stride = args.heads * kExpandedNope;
    keys.y_head = kExpandedNope;
    args.keys->run_transposed(keys);
    HeadsArgs values = latents;
    values.y = at(values_);
    values.y_stride = args.heads * kExpandedValue;
    values.y_head = kExpandedValue;
    args.values->run(values);
    must(cuda::attend_expanded({.piece = &piece,
                                .maps = &maps,
                                .heads = static_cast<int32_t>(args.heads),
                                .scale = args.scale,
                                .q = args.q.data,
                                .q_stride = args.q_stride,
                                .rotated = args.rotated.data,
                                .state = args.unfinished.data,
                                .row_dim = static_cast<int32_t>(kRowDim),
                                .out = args.out.data},
                               {stream}),
         "attention");
  }
}

const int32_t* ExpandedLatents::lengths_without(std::span<const int32_t> left_out,
                                                const StepMetadata& step,
                                                cudaStream_t stream) {
  CHECK_LE(int64_t{step.sequences}, sizes_.sequences);
  auto* const lengths = reinterpret_cast<int32_t*>(memory_.as<std::byte>() + lengths_);
  must(leave_out_sequences(step, left_out, lengths, {stream}), "lengths of sequences");
  return lengths;
}

}  // namespace nibble::cuda
