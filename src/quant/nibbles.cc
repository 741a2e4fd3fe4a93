#include "quant/nibbles.h"

#include <cstring>

namespace nibble {
namespace {

constexpr int64_t kLanes = 8;
using Words [[gnu::vector_size(4 * kLanes)]] = uint32_t;

// canonical_word() of all lanes: two exchanges, of bytes and then of nibbles, instead of spreading.
template <bool kReordered>
[[gnu::always_inline]] inline void convert(NibbleForm form,
                                           const std::byte* in,
                                           int64_t count,
                                           std::byte* out) {
  const uint32_t flip = form.flip();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Words words;
    std::memcpy(&words, in + i * 4, sizeof(words));
    if constexpr (kReordered) {
      const Words bytes = ((words >> 8) ^ words) & 0x0000ff00U;
      words ^= bytes ^ (bytes << 8);
      const Words nibbles = ((words >> 4) ^ words) & 0x00f000f0U;
      words ^= nibbles ^ (nibbles << 4);
    }
    words ^= flip;
    std::memcpy(out + i * 4, &words, sizeof(words));
  }
  for (; i < count; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, in + i * 4, 4);
    word = canonical_word(form, word);
    std::memcpy(out + i * 4, &word, 4);
  }
}

[[gnu::always_inline]] inline void convert(NibbleForm form,
                                           const std::byte* in,
                                           int64_t count,
                                           std::byte* out) {
  form.reordered ? convert<true>(form, in, count, out) : convert<false>(form, in, count, out);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void convert_wide(NibbleForm form,
                                          const std::byte* in,
                                          int64_t count,
                                          std::byte* out) {
  convert(form, in, count, out);
}
#endif

}  // namespace

void canonical_words(NibbleForm form, const std::byte* in, int64_t count, std::byte* out) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) {
    return convert_wide(form, in, count, out);
  }
#endif
  convert(form, in, count, out);
}

}  // namespace nibble
