#pragma once

#include <cstdint>

namespace nibble {

/// The most memory that this process had resident at once, in bytes.
[[nodiscard]] int64_t peak_rss_bytes();

}  // namespace nibble
