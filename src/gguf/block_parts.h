#pragma once

#include <cstddef>
#include <cstdint>

#include "gguf/types.h"

namespace nibble::gguf {

/// Where the parts of blocks go that split_blocks() takes apart; the caller's memory, aligned to
/// nothing, little-endian.
///   codes     [blocks * code_bytes()], in the canonical order of quantized weights: element i of a
///             row of 4-bit codes in bits 4(i % 2) to 4(i % 2) + 3 of byte i / 2
///   scales    [blocks * scale_bytes()]
///   minimums  [blocks * 2] F16, of Q4_1 alone; else not touched
struct BlockParts {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::byte* minimums = nullptr;
};

/// True for Q4_0, Q4_1, Q8_0 and MXFP4: codes in groups of 32 that products read as they are.
[[nodiscard]] bool has_parts(Type type);
/// Bytes of a block's codes: 16, of Q8_0 32; and of its scale: 2, of MXFP4 1. has_parts() only.
[[nodiscard]] int64_t code_bytes(Type type);
[[nodiscard]] int64_t scale_bytes(Type type);

/// Takes codes and scales of blocks of 32 elements apart, without loss:
///   Q4_0   codes as offset binary (code + 8, code from -8 to 7), scale F16: value = scale * code
///   Q4_1   the same codes, scale and minimum F16: value = scale * (code + 8) + minimum
///   Q8_0   codes in two's complement, scale F16: value = scale * code
///   MXFP4  codes in E2M1, scale in E8M0: value = 2^(scale - 127) * code. It is the byte of the
///          file: ggml doubles the codes and halves the power. Two differences from what
///          decode_blocks() gives remain: code 8 is -0 where ggml has +0, and a scale of 255, NaN
///          in E8M0, is 2^128 in ggml; no writer makes it of finite weights.
/// has_parts(type) must hold.
///   in  [blocks * type_traits(type).bytes]
void split_blocks(Type type, const std::byte* in, int64_t blocks, const BlockParts& out);

}  // namespace nibble::gguf
