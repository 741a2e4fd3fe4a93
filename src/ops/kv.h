#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "quant/kv_formats.h"

namespace nibble {

/// Tokens that attention kernels read together: of a layer with a window, the groups of so many
/// that hold a token which is seen. What lies in front of them may be anybody's.
inline constexpr int64_t kKeyGroup = 64;
static_assert(kKeyGroup == kChannelTokens);

/// The first token that the computation of tokens from `position` on reads.
[[nodiscard]] constexpr int64_t first_token_read(int64_t window, int64_t position) {
  return window > 0 && position >= window ? (position - window + 1) / kKeyGroup * kKeyGroup : 0;
}

/// How a layer's keys and values enter its cache, and queries and results meet them. Softmax does
/// not change when all keys move by the same numbers, and its weights add up to 1, so that neither
/// mean changes what is computed; but for sinks, whose logits do not move with the keys and which
/// have no values: with these, there are no means.
struct KvBasis {
  bool turns_keys = false;            // keys and queries as hadamard() turns their heads
  bool turns_values = false;          // results are turned back
  const float* key_mean = nullptr;    // [kv_heads, head_dim] in the backend's memory: taken off
                                      // keys after their rotation, before the turn; null: none
  const float* value_mean = nullptr;  // the same of values; added to results at the very end
  // kPerChannel: [kv_heads, head_dim] steps of codes, of what the turn makes; queries are
  // multiplied with those of keys, results with those of values before they are turned back.
  const float* key_step = nullptr;
  const float* value_step = nullptr;

  /// Whether results need work after attention.
  [[nodiscard]] constexpr bool changes_results() const {
    return turns_values || value_mean != nullptr || value_step != nullptr;
  }
  constexpr bool operator==(const KvBasis&) const = default;
};

/// Of a layer that says nothing else.
[[nodiscard]] constexpr KvBasis basis_of(KvCode code) {
  const bool turned = kv_format(code).turned;
  return {.turns_keys = turned, .turns_values = turned};
}

/// One layer's pages. The sizes and addresses below are the CPU's; GPUs lay pages out as
/// backend/cuda/kv_layout.h says. A page holds page_size tokens; inside it each KV head is
/// contiguous:
///   [kv_head][ K codes [page_size, row] | K params [sets] | V codes | V params ]
/// where a set is one token's parameters in f32, [page_size, p]; of kPerChannelPage keys have
/// fp16 [page_size / kChannelTokens, p, head_dim], values fp16 [page_size, p].
/// Of latent attention there are no V: a token's row is its key, and its first numbers, latent_rank
/// of them, are its value. Attention over it reads and gives whole rows, whose last numbers mean
/// nothing in a result. Its pages are
///   [ rows [page_size, row_bytes()] | params [page_size, sets, parameters] ]
/// where a row is the codes of the latent and behind them the rotated key; LatentParameters says
/// which numbers share a set and how wide parameters are. A page of the residual is
/// [kv_head][page_size, head_dim] in BF16.
struct KvView {
  KvCode code = KvCode::kBf16;
  int64_t page_size = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  std::byte* pages = nullptr;     // page p starts at pages + p * page_bytes()
  int32_t pool = 0;               // of the cache: which of a sequence's lists of pages counts
  KvScales scales;                // 1 unless the format has parameters per tensor
  KvBasis basis;                  // view_of() sets basis_of(code)
  int64_t latent_rank = 0;        // KvSpec::latent_rank(); 0: keys and values are apart
  std::byte* residual = nullptr;  // pages of keys whose group is not full; where the code has them
  int32_t residual_pool = 0;      // whose lists name these pages

  [[nodiscard]] bool latent() const { return latent_rank > 0; }
  [[nodiscard]] int64_t rope_dim() const { return latent() ? head_dim - latent_rank : 0; }
  [[nodiscard]] int64_t row_bytes() const {  // of one head's key or value of a token
    return latent() ? latent_row_bytes(code, latent_rank, rope_dim())
                    : kv_row_bytes(code, head_dim);
  }
  [[nodiscard]] int64_t key_bytes() const {  // of one head in one page
    return latent() ? page_size * (row_bytes() + latent_param_bytes(code, latent_rank))
                    : kv_key_bytes(code, head_dim, page_size);
  }
  [[nodiscard]] int64_t head_bytes() const {
    return key_bytes() + (latent() ? 0 : kv_value_bytes(code, head_dim, page_size));
  }
  [[nodiscard]] int64_t page_bytes() const { return kv_heads * head_bytes(); }
  [[nodiscard]] std::byte* keys(int64_t page, int64_t kv_head) const {
    return pages + page * page_bytes() + kv_head * head_bytes();
  }
  [[nodiscard]] std::byte* values(int64_t page, int64_t kv_head) const {
    return keys(page, kv_head) + (latent() ? 0 : key_bytes());
  }
  /// Offset of the parameters behind keys() and behind values().
  [[nodiscard]] int64_t params_offset() const { return page_size * row_bytes(); }
  [[nodiscard]] int64_t residual_page_bytes() const {
    return kv_has_residual(code) ? kv_heads * page_size * head_dim * 2 : 0;
  }
  /// One key of a page of the residual, [head_dim].
  [[nodiscard]] uint16_t* residual_key(int64_t page, int64_t kv_head, int64_t slot) const {
    return reinterpret_cast<uint16_t*>(residual + page * residual_page_bytes()) +
           (kv_head * page_size + slot) * head_dim;
  }
};

/// One sequence's share of a step: rows q_begin .. q_begin+q_len of the batch are its last q_len
/// tokens, at positions kv_len-q_len .. kv_len-1; its cache is the pages listed in order. Pages of
/// a layer with a window that end at or before first_token_read() of its first row are not read:
/// what is listed there is any page.
struct SequenceSpan {
  int32_t q_begin = 0;
  int32_t q_len = 0;
  int32_t kv_len = 0;              // including the q_len new tokens
  const int32_t* pages = nullptr;  // ceil(kv_len / page_size) entries
  int32_t prompt_len = 0;          // tokens that are computed as one prompt; DynamicRope needs it
};

/// A step's sequences with their pages in one pool of the cache.
///   sequences: with those in pool 0, [n]
///   others: the same with those in pools 1, 2, ..., [pools - 1, n]; empty where a sequence has the
///           same page numbers in all pools
[[nodiscard]] constexpr std::span<const SequenceSpan> sequences_in_pool(
    std::span<const SequenceSpan> sequences, std::span<const SequenceSpan> others, int32_t pool) {
  if (pool == 0 || others.empty()) {
    return sequences;
  }
  return others.subspan(static_cast<size_t>(pool - 1) * sequences.size(), sequences.size());
}

/// The same with their pages of a layer's residual; none where it has no residual.
[[nodiscard]] constexpr std::span<const SequenceSpan> residuals_in(
    const KvView& kv,
    std::span<const SequenceSpan> sequences,
    std::span<const SequenceSpan> others) {
  return kv_has_residual(kv.code) ? sequences_in_pool(sequences, others, kv.residual_pool)
                                  : std::span<const SequenceSpan>();
}

}  // namespace nibble
