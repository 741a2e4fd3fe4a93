#pragma once

#include "backend/cpu/simd/simd_scalar.h"

// What encoding needs beyond the vector vocabulary of the backend, in plain C++. Its results define
// those of the other files. Included by one source file.
namespace nibble::rows {
namespace {

struct Lanes : cpu::Simd {
  /// count + (a > b).
  static cpu::I32x16 count_greater(cpu::I32x16 count, cpu::F32x16 a, cpu::F32x16 b) {
    return n([&](int i) { return count.v[i] + (a.v[i] > b.v[i] ? 1U : 0U); });
  }
  /// count + (x is not zero and decoded is).
  static cpu::I32x16 count_lost(cpu::I32x16 count, cpu::F32x16 x, cpu::F32x16 decoded) {
    return n([&](int i) { return count.v[i] + (x.v[i] != 0 && decoded.v[i] == 0 ? 1U : 0U); });
  }
  /// Low four bits of each lane, lane 0 lowest, as eight bytes.
  static void store_nibbles(uint8_t* p, cpu::I32x16 codes) {
    for (int i = 0; i < 8; ++i) {
      p[i] = static_cast<uint8_t>((codes.v[2 * i] & 15U) | (codes.v[2 * i + 1] & 15U) << 4);
    }
  }
  /// Low bytes of the lanes.
  static void store_bytes(uint8_t* p, cpu::I32x16 codes) { store_u8(p, codes); }
  /// Low halves of the lanes.
  static void store_halves(uint8_t* p, cpu::I32x16 codes) {
    for (int i = 0; i < 16; ++i) {
      const auto half = static_cast<uint16_t>(codes.v[i]);
      __builtin_memcpy(p + 2 * i, &half, 2);
    }
  }
};

}  // namespace
}  // namespace nibble::rows
