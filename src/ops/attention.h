#pragma once

#include <cstdint>
#include <span>

#include "ops/activations.h"
#include "ops/attention_form.h"
#include "ops/dynamic_rope.h"
#include "ops/kv.h"

namespace nibble {

/// Causal attention over the paged cache. Where keys are turned (KvView::basis), queries are, too;
/// where values are, outputs are turned back, and then gain the mean that was taken off values.
/// Queries are rotated and the step's keys and values are already in the cache (see
/// rope_append_kv), so cached and fresh tokens are read alike.
///   q   [tokens, heads, head_dim], rows q_stride apart
///   out [tokens, heads, head_dim], rows out_stride apart
/// A token's output does not depend on which other tokens are in the batch.
struct AttentionArgs {
  ConstActivations q;
  int64_t q_stride = 0;
  Activations out;
  int64_t out_stride = 0;
  int64_t heads = 0;           // a multiple of kv.kv_heads
  float scale = 1.0F;          // applied to q·k
  int64_t sliding_window = 0;  // a token sees itself and the window-1 before it; 0: all
  KvView kv;
  std::span<const SequenceSpan> sequences;
  AttentionForm form = AttentionForm::kOwn;
  // [heads] f32 in the backend's memory: a logit of each head that takes part in the softmax and
  // has no value; null: none. kv.basis has no means then.
  const float* sinks = nullptr;
  std::span<const SequenceSpan> residuals = {};  // the same sequences, with pages of kv.residual
};

/// Normalizes the heads of q and k where the model does, rotates q in place and writes rotated k,
/// and v, into the cache, as kv.basis says.
///   qkv [tokens, (heads + 2 kv_heads) * head_dim]: q, then k, then v; rows stride apart
///   inv_freq [head_dim/2] f32; pairs are (i, i + head_dim/2); cos and sin are multiplied by
///   attention_factor (1 unless the scaling kind says otherwise).
/// Position of a row follows from its sequence: kv_len - q_len + (row - q_begin).
struct RopeAppendArgs {
  Activations qkv;
  int64_t stride = 0;
  int64_t heads = 0;
  const float* inv_freq = nullptr;
  float attention_factor = 1.0F;
  KvView kv;
  std::span<const SequenceSpan> sequences;
  const float* q_norm = nullptr;  // [head_dim] weights of an RMSNorm of each head; null: none
  const float* k_norm = nullptr;
  float norm_eps = 0.0F;
  AttentionForm form = AttentionForm::kOwn;
  DynamicRope dynamic;  // a row's frequencies are grown_frequency() of rotated_length()
  std::span<const SequenceSpan> residuals = {};  // the same sequences, with pages of kv.residual
};

/// Oracles in double precision, one token and head after another.
void reference_attention(const AttentionArgs& args);
void reference_rope_append(const RopeAppendArgs& args);

}  // namespace nibble
