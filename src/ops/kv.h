#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble {

/// Element code of cached keys and values. Quantized forms have parameters per token and head, f32
/// on the CPU and fp16 on GPUs: int8: scale = absmax/127, value = code * scale; int4: scale and
/// offset, value = code * scale + offset, codes 0..15, two per byte, low nibble first.
/// On the CPU each of the ranges min..max clipped around their middle to 1, 0.92 and 0.84 gives
/// int4 codes, these a least-squares line, that line's nearest codes the next, three times. The
/// best line's nearest codes are stored, with the line through them. fp8 (e4m3, one scale per
/// layer) exists in the CUDA backend alone.
enum class KvCode : uint8_t { kF32, kBf16, kInt8, kInt4, kFp8 };

/// Bytes of one head's codes for one token.
[[nodiscard]] constexpr int64_t kv_row_bytes(KvCode code, int64_t head_dim) {
  switch (code) {
    case KvCode::kF32:
      return head_dim * 4;
    case KvCode::kBf16:
      return head_dim * 2;
    case KvCode::kInt8:
    case KvCode::kFp8:
      return head_dim;
    case KvCode::kInt4:
      return head_dim / 2;
  }
  return 0;
}

/// Parameters of one head for one token, of K or of V.
[[nodiscard]] constexpr int64_t kv_row_params(KvCode code) {
  return code == KvCode::kInt4 ? 2 : (code == KvCode::kInt8 ? 1 : 0);
}

/// One layer's pages. The sizes and addresses below are the CPU's; GPUs lay pages out as
/// backend/cuda/kv_layout.h says. A page holds page_size tokens; inside it each KV head is
/// contiguous:
///   [kv_head][ K codes [page_size, row] | K params f32 [page_size, p] | V codes | V params ]
struct KvView {
  KvCode code = KvCode::kBf16;
  int64_t page_size = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  std::byte* pages = nullptr;  // page p starts at pages + p * page_bytes()

  [[nodiscard]] int64_t half_bytes() const {  // K or V of one head in one page
    return page_size * (kv_row_bytes(code, head_dim) + 4 * kv_row_params(code));
  }
  [[nodiscard]] int64_t page_bytes() const { return kv_heads * 2 * half_bytes(); }
  [[nodiscard]] std::byte* keys(int64_t page, int64_t kv_head) const {
    return pages + page * page_bytes() + kv_head * 2 * half_bytes();
  }
  [[nodiscard]] std::byte* values(int64_t page, int64_t kv_head) const {
    return keys(page, kv_head) + half_bytes();
  }
  /// Offset of the parameters inside a K or V half.
  [[nodiscard]] int64_t params_offset() const { return page_size * kv_row_bytes(code, head_dim); }
};

/// One sequence's share of a step: rows q_begin .. q_begin+q_len of the batch are its last q_len
/// tokens, at positions kv_len-q_len .. kv_len-1; its cache is the pages listed in order.
struct SequenceSpan {
  int32_t q_begin = 0;
  int32_t q_len = 0;
  int32_t kv_len = 0;              // including the q_len new tokens
  const int32_t* pages = nullptr;  // ceil(kv_len / page_size) entries
  int32_t prompt_len = 0;          // tokens that are computed as one prompt; DynamicRope needs it
};

}  // namespace nibble
