#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble {

/// How eight 4-bit integers lie in a word. Canonical, that of QuantTensor: element i in bits
/// 4i..4i+3, as code + 8.
struct NibbleForm {
  bool reordered = false;    // slot i holds element [0, 2, 4, 6, 1, 3, 5, 7][i] instead of i
  bool signed_code = false;  // two's complement instead of code + 8

  bool operator==(const NibbleForm&) const = default;
  /// What turns the codes of a word that is in order into code + 8, by exclusive or.
  [[nodiscard]] uint32_t flip() const { return signed_code ? 0x88888888U : 0; }
};

/// `count` words in `form` as canonical ones. in and out may be the same memory, aligned to
/// nothing.
void canonical_words(NibbleForm form, const std::byte* in, int64_t count, std::byte* out);

/// One word, for loops that the compiler turns into vector code.
[[gnu::always_inline]] inline uint32_t canonical_word(NibbleForm form, uint32_t word) {
  const auto spread = [](uint32_t half) {
    const uint32_t bytes = (half | (half << 8)) & 0x00ff00ffU;
    return (bytes | (bytes << 4)) & 0x0f0f0f0fU;
  };
  const uint32_t ordered =
      form.reordered ? spread(word & 0xffffU) | (spread(word >> 16) << 4) : word;
  return ordered ^ form.flip();
}

}  // namespace nibble
