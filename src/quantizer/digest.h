#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace nibble {

/// XXH3-128 of some bytes, in its canonical (big-endian) form.
using Digest = std::array<uint8_t, 16>;

[[nodiscard]] Digest digest_of(std::span<const std::byte> bytes);
[[nodiscard]] Digest digest_of(std::string_view text);
/// The hash of a tensor: that of the hashes of its chunks, in order, so that threads can hash
/// chunks independently.
[[nodiscard]] Digest combine_digests(std::span<const Digest> chunks);
/// 32 lower-case hexadecimal digits.
[[nodiscard]] std::string digest_text(const Digest& digest);

}  // namespace nibble
