#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "core/dtype.h"
#include "gguf/types.h"

namespace nibble {

/// One tensor of a checkpoint. Of GGUF files only: `blocks` and `paired_heads`.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;                  // of tensors in blocks, bytes
  const gguf::TypeTraits* blocks = nullptr;  // elements lie in blocks of this type
  int64_t paired_heads = 0;    // so many heads, whose rows lie in pairs (arch/family.h); 0: none
  std::vector<int64_t> shape;  // empty: a scalar
  /// Little-endian elements, row-major, inside the file's bytes. No alignment is promised.
  std::span<const std::byte> data;

  [[nodiscard]] int64_t elements() const;
  /// "BF16", "Q4_1": for people.
  [[nodiscard]] std::string_view type_name() const {
    return blocks == nullptr ? dtype_name(dtype) : blocks->name;
  }
};

struct SafetensorsContent {
  std::vector<TensorInfo> tensors;  // in file order
  // Bytes of tensors that the file has in parts; of GGUF files only.
  std::vector<std::vector<std::byte>> joined;
  std::map<std::string, std::string> metadata;
};

/// Checks a whole file and lists its tensors; the spans point into `file`. Refuses (kCorrupt) every
/// violation that the reference reader refuses: short file, header larger than 100 MB or than the
/// file, bad UTF-8 or JSON, duplicate names, metadata that is not text, unknown dtypes, shapes that
/// overflow, sizes that contradict shapes, holes, overlaps and trailing bytes.
///   where  the file's name for error messages
Result<SafetensorsContent> parse_safetensors(std::span<const std::byte> file,
                                             std::string_view where);

/// "[2, 3]".
[[nodiscard]] std::string shape_text(std::span<const int64_t> shape);

/// Elements times bits in whole bytes; kCorrupt on a negative dimension, an overflow or a size that
/// is not whole bytes.
Result<int64_t> tensor_bytes(DType dtype, std::span<const int64_t> shape);

}  // namespace nibble
