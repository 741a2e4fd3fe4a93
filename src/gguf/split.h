#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/file.h"
#include "gguf/file.h"

namespace nibble::gguf {

/// Whether a path is a GGUF file: a regular file that begins with the format's magic.
[[nodiscard]] bool is_gguf_path(const std::string& path);

/// One mapped file and what it holds.
struct Part {
  MappedFile file;
  Content content;
};

/// The one file, or all files of a split set, that hold a model. Move-only; tensors and metadata
/// stay where they are.
class FileSet final {
 public:
  /// Maps and parses `path` and, where it is the first of a set ("x-00001-of-00003.gguf", split.*
  /// in its metadata), the other files beside it. Errors: those of MappedFile::open() and
  /// parse_gguf(); kInvalidArgument for a later file of a set, naming the first; kNotFound for
  /// missing files, naming them; kCorrupt where names, split.no, split.count and
  /// split.tensors.count contradict each other, or two files hold a tensor of the same name.
  static Result<FileSet> open(const std::string& path);

  /// That of the first file, which alone describes the model.
  [[nodiscard]] const Metadata& metadata() const { return parts_.front().content.metadata; }
  [[nodiscard]] const std::vector<Part>& parts() const { return parts_; }
  /// The files alone, for whoever keeps them.
  [[nodiscard]] std::vector<Part> take_parts() && { return std::move(parts_); }
  /// A tensor of any file.
  [[nodiscard]] const Tensor* find(std::string_view name) const;
  [[nodiscard]] size_t tensor_count() const { return index_.size(); }

 private:
  FileSet() = default;
  Status add(Part part);

  std::vector<Part> parts_;
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> index_;  // part, tensor
};

}  // namespace nibble::gguf
