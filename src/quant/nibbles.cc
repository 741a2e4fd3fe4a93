#include "quant/nibbles.h"

#include <cstring>

namespace nibble {

void canonical_words(NibbleForm form, const std::byte* in, int64_t count, std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, in + i * 4, 4);
    word = canonical_word(form, word);
    std::memcpy(out + i * 4, &word, 4);
  }
}

}  // namespace nibble
