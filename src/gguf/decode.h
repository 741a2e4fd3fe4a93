#pragma once

#include <cstddef>
#include <cstdint>

#include "gguf/types.h"

namespace nibble::gguf {

/// Values of `blocks` blocks of one type, as gguf-py's dequantize() gives them: the same
/// operations in the same order, so the same bits (of a NaN, only that it is one). Blocks lie one
/// after another, aligned to nothing; rows that follow each other are decoded in one call. Integers
/// and F64 are rounded to the nearest float.
///   in   [blocks * type_traits(type).bytes]
///   out  [blocks * type_traits(type).elements]
void decode_blocks(Type type, const std::byte* in, int64_t blocks, float* out);

}  // namespace nibble::gguf
