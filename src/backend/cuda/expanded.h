#pragma once

#include <cstdint>
#include <span>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "backend/cuda/latent.h"
#include "backend/cuda/launch.h"

namespace nibble::cuda {

// Prefill of latent attention over keys and values that are made from the cached rows
// (backend/expanded_latent.h), of one form: latents of 512 numbers, keys of 128 and 64 rotated
// ones, values of 128; on sm_90a.
inline constexpr int32_t kExpandedRank = 512;
inline constexpr int32_t kExpandedRope = 64;
inline constexpr int32_t kExpandedNope = 128;   // numbers of a key that are a head's own
inline constexpr int32_t kExpandedValue = 128;  // numbers of a value
inline constexpr int32_t kExpandedTile = 128;   // tokens, and rows, that are multiplied at once
inline constexpr int32_t kExpandedState = kExpandedValue + 2;  // floats of a row that goes on

/// Tokens first_token .. first_token + tokens of a sequence, which lie from row `base` of a piece
/// on, and the rows of the step that see some of them. What a row has of earlier tokens comes from
/// its state, and where its block of rows sees later ones, all of it goes back there.
struct ExpandedSegment {
  int32_t sequence = 0;
  int32_t first_row = 0;       // of the step
  int32_t rows = 0;            // at least 1
  int32_t first_position = 0;  // of the first row, in its sequence
  int32_t first_token = 0;     // every block of kExpandedTile rows sees it
  int32_t tokens = 0;
  int32_t base = 0;   // a multiple of kExpandedTile
  int32_t block = 0;  // blocks of rows of the segments before

  bool operator==(const ExpandedSegment&) const = default;
};

/// What is expanded at once. Between its segments and behind them are rows that are zeros.
struct ExpandedPiece {
  static constexpr int32_t kSegments = 32;

  ExpandedSegment segments[kSegments] = {};
  int32_t count = 0;
  int32_t tokens = 0;  // with those rows: a multiple of kExpandedTile
  int32_t blocks = 0;  // of kExpandedTile rows, of all segments
};

/// The rows of a piece out of the cache, of bf16, fp8, int8 or int4.
struct GatherLatentsLaunch {
  LatentShape shape;
  StepMetadata step;
  const ExpandedPiece* piece = nullptr;
  const void* pages = nullptr;  // of the layer
  void* latents = nullptr;      // [piece.tokens, kExpandedRank] bf16
  void* rotated = nullptr;      // [piece.tokens, kExpandedRope] bf16
};
cudaError_t gather_latents(const GatherLatentsLaunch& args, const LaunchContext& context);

/// Keys and values of a piece, bf16, in boxes of kExpandedTile tokens (TensorMaps::map_bf16):
///   keys [tokens, heads * kExpandedNope], two panels a box; rotated [tokens, kExpandedRope], one;
///   values [tokens, heads * kExpandedValue], two
struct ExpandedMaps {
  CUtensorMap keys;
  CUtensorMap rotated;
  CUtensorMap values;
};

/// Attention of the rows of a piece's segments over their tokens, causally. Results do not depend
/// on timing, nor on other segments.
struct ExpandedLaunch {
  const ExpandedPiece* piece = nullptr;
  const ExpandedMaps* maps = nullptr;
  int32_t heads = 0;
  float scale = 1.0F;
  const void* q = nullptr;  // [rows, heads, 192] bf16, of which the first 128 are read
  int64_t q_stride = 0;
  const void* rotated = nullptr;  // [rows, heads, row_dim] bf16, of which the last 64 are read
  void* state = nullptr;          // [rows, heads, row_dim] bf16 in size: kExpandedState floats each
  int32_t row_dim = 0;            // of the two, whose rows are dense
  void* out = nullptr;            // [rows, heads, kExpandedValue] bf16, of rows that are finished
};
cudaError_t attend_expanded(const ExpandedLaunch& args, const LaunchContext& context);

/// lengths[s] = kv_len[s], but 0 for some sequences of the step, which plan_latent() then leaves
/// out. The host's `left_out` is read before this returns.
cudaError_t leave_out_sequences(const StepMetadata& step,
                                std::span<const int32_t> left_out,
                                int32_t* lengths,
                                const LaunchContext& context);

}  // namespace nibble::cuda
