#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "core/dtype.h"

namespace nibble {

/// Name, type and shape of a tensor that will be written.
struct TensorPlan {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  int64_t bytes = 0;  // of tensor_bytes(); set by the writer
};

/// Text of a safetensors file up to its data, length prefix included: tensors in the given order,
/// metadata {"format": "pt"}, padded with blanks so that the data begins at a multiple of 8.
std::string safetensors_header(std::span<const TensorPlan> tensors);

/// Writes a checkpoint tensor by tensor into an existing folder: headers come from the plan, and
/// each tensor's data goes to its place as soon as it is known, so that one is in memory at a time.
///
/// Shards are filled in the order of the plan; within one shard the tensors are sorted as the
/// reference writer does (dtype rank descending, then name). One shard is called
/// model.safetensors; several come with model.safetensors.index.json.
class CheckpointWriter final {
 public:
  /// shard_bytes: the most data in one file (one larger tensor gets a file of its own).
  /// kInvalidArgument on a duplicate name.
  static Result<CheckpointWriter> create(const std::string& folder,
                                         std::vector<TensorPlan> plan,
                                         int64_t shard_bytes);

  /// Writes the data of a planned tensor, in any order. Files are flushed and closed when their
  /// last tensor arrives: writing in the plan's order keeps one file open.
  Status write(std::string_view name, std::span<const std::byte> data);
  /// Writes the next part of a tensor that is made in pieces; its parts come in order.
  Status write_part(std::string_view name, std::span<const std::byte> part);
  /// Writes the index. Every tensor must have been written.
  Status finish();
  /// Bytes of all files, headers included.
  [[nodiscard]] int64_t bytes_written() const { return bytes_written_; }

 private:
  struct Shard {
    std::vector<TensorPlan> tensors;
    std::optional<OutputFile> file;
    size_t written = 0;
    int64_t data_begin = 0;  // bytes of the header
  };
  struct Place {
    size_t shard = 0;
    size_t tensor = 0;  // index into Shard::tensors
    int64_t offset = 0;
    int64_t written = 0;  // bytes
    bool complete = false;
  };

  CheckpointWriter() = default;
  Status plan_shards(std::vector<TensorPlan> plan, int64_t shard_bytes);
  [[nodiscard]] std::string shard_name(size_t shard) const;
  Status write_index();

  std::string folder_;
  std::vector<Shard> shards_;
  std::unordered_map<std::string, Place> places_;
  size_t missing_ = 0;  // tensors without data
  int64_t bytes_written_ = 0;
};

}  // namespace nibble
