#pragma once

#include <cstdint>

namespace nibble {

/// The most memory that this process had resident at once, in bytes.
[[nodiscard]] int64_t peak_rss_bytes();

/// The memory that this process has resident now, in bytes; 0 if the system does not tell.
[[nodiscard]] int64_t rss_bytes();

/// Gives the system back what the allocator keeps of freed memory.
void release_free_memory();

/// Lets the allocator keep no more than a few megabytes at the end of each thread's heap, which
/// release_free_memory() does not reach. For processes that live long; costs nothing until so much
/// is freed at once.
void bound_free_memory();

}  // namespace nibble
