#include "quantizer/digest.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace nibble {

Digest digest_of(std::span<const std::byte> bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  Digest digest;
  static_assert(sizeof(canonical.digest) == sizeof(digest));
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), digest.begin());
  return digest;
}

Digest digest_of(std::string_view text) {
  return digest_of(std::as_bytes(std::span(text.data(), text.size())));
}

Digest combine_digests(std::span<const Digest> chunks) { return digest_of(std::as_bytes(chunks)); }

std::string digest_text(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

}  // namespace nibble
