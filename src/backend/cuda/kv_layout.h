#pragma once

#include <cstdint>

#include "ops/kv.h"

namespace nibble::cuda {

/// Pages of one layer on the GPU. A page holds page_size tokens, in it each KV head is contiguous,
/// and of a head every tile of kv_tile_tokens(code) tokens:
///   [page][kv_head][tile][ K rows | V rows | parameters ]
/// Rows hold head_dim elements in the order of ops/kv.h (int4: two per byte, low nibble first), but
/// 16-byte chunks change places so that eight rows' same chunk lies in different banks
/// (kv_row_offset); rows above 128 bytes are cut into columns of 128 bytes. bf16 rows are so what
/// wgmma reads as its 128-byte swizzle.
/// int8 codes are stored plus 128. Parameters are fp16 per token and head: int8 {scale}, value =
/// (code - 128) * scale; int4 {scale, offset}, value = code * scale + offset; int4_static
/// has none, as KvBasis has its steps, value = (code - 8) * step; K's, then V's, in the
/// order of kv_parameter_index. int4_page has {scale, offset} of V per token and head, and of K per
/// channel of the tile, whose tokens are one group: all scales, then all offsets, in the order of
/// kv_channel_index. Its keys in BF16 are in pages of their own, [page][kv_head][group of 64
/// tokens], rows of a group as those of K of four bf16 tiles. fp8 is e4m3 with one scale per layer
/// and none per token, as vLLM and SGLang keep it: values past 448 times the scale are clipped. The
/// scales are those of the layer's KvScales.
struct KvLayout {
  KvCode code = KvCode::kBf16;
  int32_t page_size = 64;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};

/// Tokens of a tile; page_size must be a multiple: as many as have 256 bits of one element each.
[[nodiscard]] constexpr int32_t kv_tile_tokens(KvCode code) { return 256 / kv_format(code).bits; }

/// The page size to use.
[[nodiscard]] constexpr int32_t preferred_page_size(KvCode /*code*/) { return 64; }

/// fp16 parameters per token and head of V; as many of K, per token and head or per channel.
[[nodiscard]] constexpr int32_t kv_parameters(KvCode code) {
  return kv_has_residual(code) ? kv_format(code).parameters
                               : static_cast<int32_t>(kv_row_params(code));
}

/// Bytes of the K rows of a tile, as many of the V rows.
[[nodiscard]] constexpr int32_t kv_tile_rows_bytes(KvCode code, int32_t head_dim) {
  return kv_tile_tokens(code) * static_cast<int32_t>(kv_row_bytes(code, head_dim));
}

/// Bytes of K's parameters of a tile, and of V's.
[[nodiscard]] constexpr int32_t kv_key_parameter_bytes(KvCode code, int32_t head_dim) {
  return 2 * kv_parameters(code) * (kv_has_residual(code) ? head_dim : kv_tile_tokens(code));
}
[[nodiscard]] constexpr int32_t kv_value_parameter_bytes(KvCode code) {
  return 2 * kv_parameters(code) * kv_tile_tokens(code);
}

[[nodiscard]] constexpr int32_t kv_tile_bytes(KvCode code, int32_t head_dim) {
  return 2 * kv_tile_rows_bytes(code, head_dim) + kv_key_parameter_bytes(code, head_dim) +
         kv_value_parameter_bytes(code);
}

[[nodiscard]] constexpr int64_t page_bytes(const KvLayout& kv) {
  return int64_t{kv.kv_heads} * (kv.page_size / kv_tile_tokens(kv.code)) *
         kv_tile_bytes(kv.code, kv.head_dim);
}

/// Where byte `byte` of row `token` lies within the K (or V) rows of a tile.
[[nodiscard]] constexpr int32_t kv_row_offset(int32_t row_bytes, int32_t token, int32_t byte) {
  const int32_t width = row_bytes < 128 ? row_bytes : 128;  // of a column
  const int32_t line = (token % 8) * width + byte % width;  // within 8 rows of a column
  const int32_t swizzled = line ^ ((line >> 3) & 0x70);
  return (token / 8) * 8 * row_bytes + (byte / width) * 8 * width + swizzled;
}

/// Where byte `byte` of the key of `slot` lies in a KV head of a page of the residual.
[[nodiscard]] constexpr int64_t kv_residual_offset(int32_t head_dim, int32_t slot, int32_t byte) {
  return int64_t{slot / 8} * 16 * head_dim + kv_row_offset(2 * head_dim, slot % 8, byte);
}

/// Which of the tile's parameter sets belongs to a token: those of tokens 8 apart are neighbours.
[[nodiscard]] constexpr int32_t kv_parameter_index(KvCode code, int32_t token) {
  return token % 8 * (kv_tile_tokens(code) / 8) + token / 8;
}

/// Which scale (or offset) of a tile belongs to channel d of K: those that a lane multiplies
/// neighbouring words by are neighbours (KvTile::key_dim), channels d and d + 4 of each 32 in turn.
[[nodiscard]] constexpr int32_t kv_channel_index(int32_t d) {
  return d / 8 * 8 + d % 4 * 2 + d / 4 % 2;
}
static_assert(kv_tile_tokens(KvCode::kInt4Page) == kChannelTokens);

}  // namespace nibble::cuda
