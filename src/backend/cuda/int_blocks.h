#pragma once

#include <cstdint>

#include "quant/block_precision.h"

namespace nibble::cuda {

/// How rows of ActFormat::kBf16Blocks lie: bytes of the channels in INT8, then the numbers of those
/// in BF16, each part filled up with zeros to K blocks of 128 bytes, an even number of them.
struct WideRows {
  int int8_channels = 0;
  int int8_blocks = 0, bf16_blocks = 0;  // of 128 and of 64 channels
  const int32_t* places = nullptr;       // [k / block], device memory: the byte of a row that each
                                         // block begins at

  [[nodiscard]] constexpr int blocks() const { return int8_blocks + bf16_blocks; }
  [[nodiscard]] constexpr int64_t row_bytes() const { return int64_t{128} * blocks(); }
};

/// The most bytes of a row of k channels, in numbers of BF16.
[[nodiscard]] constexpr int64_t most_wide_row_numbers(int64_t k) { return k + 256; }

/// Tables of so many channels travel with the arguments of a launch: what lies in memory, out of
/// whose caches a step's weights have driven it, takes a microsecond to come.
inline constexpr int64_t kChannelsHere = 65536;

/// Rows in blocks of two precisions (ActFormat::kIntBlocks, kBf16Blocks), as kernels see them:
/// pointers are device memory.
struct IntBlocks {
  int block = 0;                              // channels
  bool here = false;                          // whether `eight` has all channels
  uint32_t eight[kChannelsHere / 1024] = {};  // a bit for each 32 channels, 1 for 8 bits
  BlockScales scales = BlockScales::kEach;
  float clip = 1.0F;
  const uint8_t* bits = nullptr;     // [k / block], 4 or 8; of kBf16Blocks 8 or 16
  const int32_t* columns = nullptr;  // [k]: which element of the row each channel is; or none
  // Of each of int_k_blocks() blocks of 128 of K a bit for each 32 channels, 1 for 8 bits.
  const uint8_t* masks = nullptr;
  WideRows wide;  // of kBf16Blocks
};

/// Those of the rows that the experts of a layer read.
struct ExpertBlocks {
  // Of all experts' rows. Where they differ, what they have in common, and an order of columns if
  // any of them has one.
  IntBlocks all;
  const IntBlocks* each = nullptr;  // [experts], in device memory: of every expert; or none
};

/// Blocks of 128 that K is filled up to.
[[nodiscard]] constexpr int64_t int_k_blocks(int64_t k) { return (k + 511) / 512 * 4; }

/// Scales lie token by token for each block of K, so that a product reads those of its tokens as
/// they lie: rows of int_scale_stride(m), int_scale_rows() of them, the ones beyond K zeros. Where
/// blocks share a scale there is one row of them, as of kInt8Token.
[[nodiscard]] constexpr int64_t int_scale_stride(int64_t m) {
  return m <= 8 ? 8 : m <= 16 ? 16 : (m + 31) / 32 * 32;
}
[[nodiscard]] constexpr int64_t int_scale_rows(const IntBlocks& blocks, int64_t k) {
  return blocks.scales == BlockScales::kEach ? int_k_blocks(k) * (128 / blocks.block) : 1;
}

}  // namespace nibble::cuda
