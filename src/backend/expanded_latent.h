#pragma once

#include <cstdint>

#include "backend/prepared_heads.h"
#include "ops/kv.h"

namespace nibble {

/// Latent attention in its expanded form: keys and values of all heads are made from the cached
/// rows, [nope_dim | rotated key of the row] and [value_dim], and a head's queries attend over
/// them. Less is multiplied than over the rows themselves (kv.head_dim and kv.latent_rank numbers
/// for a query and a token), but keys and values have to be made: it pays for many queries.
struct ExpandedLatentArgs {
  int64_t heads = 0;
  int64_t nope_dim = 0;
  int64_t value_dim = 0;
  float scale = 1.0F;  // applied to scores
  /// [rows, heads, nope_dim + kv.rope_dim()], rows q_stride apart; what is to be rotated is not
  /// read.
  ConstActivations q;
  int64_t q_stride = 0;
  ConstActivations rotated;  // [rows, heads, kv.head_dim] of rotate_latent_queries()
  Activations unfinished;    // [rows, heads, kv.head_dim]: what lies in rows of `out` is kept here
  Activations out;           // [rows, heads, value_dim]
  PreparedHeads* keys = nullptr;    // of each head [kv.latent_rank, nope_dim]
  PreparedHeads* values = nullptr;  // of each head [value_dim, kv.latent_rank]
  KvView kv;
};

}  // namespace nibble
