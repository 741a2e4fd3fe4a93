#pragma once

#include <cstdint>
#include <span>

#include "ops/activations.h"
#include "ops/kv.h"

namespace nibble {

/// How the rotated parts of latent attention turn. What leaves an operation has its pairs in halves
/// (i and i + dim/2), whatever they were: queries and keys agree, so that scores do not change.
struct LatentRope {
  const float* inv_freq = nullptr;  // [dim / 2] f32
  int64_t dim = 0;
  float attention_factor = 1.0F;  // multiplies cos and sin
  bool interleaved = true;        // numbers come in pairs: 2i and 2i + 1
};

/// What every token brings to the cache of latent attention (DeepSeek-V2, section 2.1): the cached
/// row is the normed latent, from which keys and values of all heads could be made, and behind it
/// the rotated key that all heads share. Queries of a low rank are normed where they lie.
///   rows [tokens]: the first stage of queries [q_rank], the latent [kv.head_dim - rope.dim], the
///   key before its rotation [rope.dim]; `stride` apart
struct LatentAppendArgs {
  Activations rows;
  int64_t stride = 0;
  int64_t q_rank = 0;             // of what comes in front of the latent
  const float* q_norm = nullptr;  // [q_rank] weights of an RMSNorm; null: it stays as it is
  const float* latent_norm = nullptr;
  float norm_eps = 0.0F;
  LatentRope rope;
  KvView kv;
  std::span<const SequenceSpan> sequences;
};

/// Rotates the last rope.dim numbers of each head of queries and stores them as the last ones of
/// the head's row in `out`, beside what the head's products make of its first numbers.
///   q   [tokens, heads, head_dim], rows q_stride apart
///   out [tokens, heads, out_dim], dense
struct LatentQueryArgs {
  ConstActivations q;
  int64_t q_stride = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  LatentRope rope;
  Activations out;
  int64_t out_dim = 0;
  std::span<const SequenceSpan> sequences;
};

/// Oracles in double precision.
void reference_latent_append(const LatentAppendArgs& args);
void reference_latent_queries(const LatentQueryArgs& args);

}  // namespace nibble
