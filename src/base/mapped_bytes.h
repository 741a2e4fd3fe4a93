#pragma once

#include <cstddef>
#include <span>

#include "base/writable_file.h"

namespace nibble {

/// Copies `count` bytes, whoever's they are. Long pieces of a MappedFile are read from the file
/// instead: pages that were never mapped neither fault nor count as resident memory, nor does
/// anybody wait until they are unmapped. From several threads at once.
void copy_bytes(const std::byte* from, size_t count, std::byte* to);
using CopyBytes = void(const std::byte* from, size_t count, std::byte* to);

/// For MappedFile: from here on copy_bytes() reads `bytes`, all of an open file, from that file.
void note_mapped(std::span<const std::byte> bytes, Descriptor file);
/// Before `bytes` are unmapped.
void forget_mapped(std::span<const std::byte> bytes);

}  // namespace nibble
