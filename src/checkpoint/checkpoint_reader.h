#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "checkpoint/safetensors.h"

namespace nibble {

/// Whether a tensor holds the rotation's frequencies, which old checkpoints store although they
/// follow from config.json.
[[nodiscard]] bool is_rope_frequencies(std::string_view tensor);

/// All tensors of a model folder, mapped read-only; nothing is read until somebody touches the
/// bytes. Immutable and thread-safe after open().
class CheckpointReader final {
 public:
  /// path: a folder with model.safetensors, or with model.safetensors.index.json and its shards, or
  /// one .safetensors file, or a GGUF file (of a split set the first), whose tensors then have the
  /// names that its family has in Hugging Face checkpoints. Only files that the index names are
  /// opened. Errors: kNotFound (no checkpoint, a missing shard), kCorrupt (a file that contradicts
  /// its format, an index and shards that do not hold the same tensors).
  static Result<CheckpointReader> open(const std::string& path);

  /// nullptr when there is none of this name.
  [[nodiscard]] const TensorInfo* find(std::string_view name) const;
  /// kNotFound naming tensor and folder.
  [[nodiscard]] Result<const TensorInfo*> require(std::string_view name) const;
  /// In file order: shard by shard, ascending offset.
  [[nodiscard]] const std::vector<const TensorInfo*>& tensors() const { return order_; }
  /// "model-00001-of-00002.safetensors: tensor X": the beginning of error messages.
  [[nodiscard]] std::string where(const TensorInfo& tensor) const;
  /// Name of the file that holds the tensor, without folder.
  [[nodiscard]] std::string_view file_of(const TensorInfo& tensor) const;
  /// Path of the file that holds the tensor.
  [[nodiscard]] const std::string& path_of(const TensorInfo& tensor) const;
  /// Metadata of the file that holds the tensor.
  [[nodiscard]] const std::map<std::string, std::string>& metadata_of(
      const TensorInfo& tensor) const;
  /// Bytes of tensor data over all files.
  [[nodiscard]] int64_t total_bytes() const;
  /// Starts to read a tensor's bytes from the disk, without waiting for them.
  void read_ahead(const TensorInfo& tensor) const;
  /// Lets the system forget a tensor's pages: for streaming through models larger than memory.
  void drop_pages(const TensorInfo& tensor) const;
  /// The same for several, those that lie side by side at once: models have 200,000 tensors.
  void read_ahead(std::span<const TensorInfo* const> tensors) const;
  void drop_pages(std::span<const TensorInfo* const> tensors) const;
  /// Lets the system forget the pages of all files.
  void drop_all_pages() const;
  /// The same for any bytes of the mapped files.
  void read_ahead(std::span<const std::byte> part) const;
  void drop_pages(std::span<const std::byte> part) const;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  struct Shard {
    MappedFile file;
    SafetensorsContent content;
  };

  CheckpointReader() = default;
  Status add_file(const std::string& path);
  Status open_gguf(const std::string& path);
  Status enter_tensors();
  Status open_sharded(const std::string& folder, const std::string& index_path);
  /// kCorrupt unless index and shards hold the same tensors.
  [[nodiscard]] Status check_index(
      const std::vector<std::pair<std::string, std::string>>& weight_map) const;
  [[nodiscard]] const Shard& shard_of(const TensorInfo& tensor) const;
  /// nullptr for bytes in memory: those of tensors that a file has in parts.
  [[nodiscard]] const MappedFile* file_at(std::span<const std::byte> part) const;

  std::string path_;
  std::vector<Shard> shards_;
  std::vector<const TensorInfo*> order_;
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;
};

}  // namespace nibble
