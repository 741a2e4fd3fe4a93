#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf/metadata.h"
#include "gguf/types.h"

namespace nibble::gguf {

/// One tensor of a file. Name and data point into the file.
struct Tensor {
  std::string_view name;
  Type type = Type::kF32;
  /// Slowest dimension first, the other way round than the file says it; empty: a scalar. The last
  /// one is a whole number of blocks.
  std::vector<int64_t> shape;
  /// Blocks, row-major. Aligned to the file's alignment from the start of the file.
  std::span<const std::byte> data;

  [[nodiscard]] int64_t elements() const;
  [[nodiscard]] int64_t blocks() const { return elements() / type_traits(type).elements; }
};

/// What a file holds: metadata and tensors, in file order.
class Content final {
 public:
  explicit Content(std::string where) : metadata(std::move(where)) {}
  /// False if a tensor of this name is there already.
  bool add(Tensor tensor);

  [[nodiscard]] const Tensor* find(std::string_view name) const;
  [[nodiscard]] const std::vector<Tensor>& tensors() const { return tensors_; }
  [[nodiscard]] std::vector<Tensor>& tensors() { return tensors_; }

  Metadata metadata;
  uint32_t version = 0;    // 2 or 3
  uint64_t alignment = 0;  // of the tensors' data

 private:
  std::vector<Tensor> tensors_;
  std::unordered_map<std::string_view, size_t> index_;
};

/// True if the first bytes are those of a GGUF file of any version and byte order.
[[nodiscard]] bool is_gguf(std::span<const std::byte> file);

/// Checks a whole file of version 2 or 3 and lists its metadata and tensors, which point into
/// `file`. Allocates in proportion to the file only. kUnsupported: other versions, big-endian
/// files, types of tensors that are not read, arrays of arrays. kCorrupt: every violation of the
/// format: a short file, counts and lengths beyond its end, keys or names that repeat, are empty or
/// no UTF-8, unknown types, shapes that are zero, overflow or have more than four dimensions, rows
/// that are no whole number of blocks, an alignment that is no power of two, data that is
/// misaligned, overlaps or lies outside the file.
///   where  the file's name for error messages
Result<Content> parse_gguf(std::span<const std::byte> file, std::string_view where);

}  // namespace nibble::gguf
