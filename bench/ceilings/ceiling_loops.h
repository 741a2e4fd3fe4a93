#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::cpu {

// Loops that do nothing but load, or nothing but multiply, each compiled for its instruction set
// (ceilings_*.cc). A caller must know that the machine has it.

/// Sums the bytes' words, 64 bytes at a time, with prefetches as products of one row have them.
/// `bytes` is a multiple of kReadStep.
inline constexpr int64_t kReadStep = 512;
inline constexpr int64_t kReadAhead = 4096;      // into the first level
inline constexpr int64_t kReadFarAhead = 16384;  // into the second
uint64_t read_loop_avx512(const std::byte* data, int64_t bytes);

/// Multiplications and additions of registers, that many times; each gives the operations of one
/// turn in its constant (two per multiply-add). Results are independent of each other and the
/// latency is hidden.
inline constexpr int64_t kFma256Ops = int64_t{12} * 8 * 2;
inline constexpr int64_t kFma512Ops = int64_t{12} * 16 * 2;
inline constexpr int64_t kVnni256Ops = int64_t{12} * 32 * 2;
inline constexpr int64_t kVnni512Ops = int64_t{12} * 64 * 2;
inline constexpr int64_t kAmxInt8Ops = int64_t{4} * 16 * 16 * 64 * 2;  // 2 x 2 tiles of sums
inline constexpr int64_t kAmxBf16Ops = int64_t{4} * 16 * 16 * 32 * 2;
void fma256_loop(int64_t turns);
void fma512_loop(int64_t turns);
void vnni256_loop(int64_t turns);
void vnni512_loop(int64_t turns);
void amx_int8_loop(int64_t turns);
void amx_bf16_loop(int64_t turns);

}  // namespace nibble::cpu
