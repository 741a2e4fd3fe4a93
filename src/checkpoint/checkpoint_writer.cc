#include "checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/check.h"
#include "base/json.h"
#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

bool reference_order(const TensorPlan& a, const TensorPlan& b) {
  return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
}

}  // namespace

std::string safetensors_header(std::span<const TensorPlan> tensors) {
  std::string text = R"({"__metadata__":{"format":"pt"})";  // no tree: there may be 200,000
  int64_t at = 0;
  for (const TensorPlan& tensor : tensors) {
    text += ',';
    append_json_string(text, tensor.name);
    fmt::format_to(std::back_inserter(text),
                   R"(:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                   dtype_name(tensor.dtype), fmt::join(tensor.shape, ","), at, at + tensor.bytes);
    at += tensor.bytes;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t size = text.size();
  std::string prefix(8, '\0');
  std::memcpy(prefix.data(), &size, 8);
  return prefix + text;
}

Result<CheckpointWriter> CheckpointWriter::create(const std::string& folder,
                                                  std::vector<TensorPlan> plan,
                                                  int64_t shard_bytes) {
  CheckpointWriter writer;
  writer.folder_ = folder;
  writer.missing_ = plan.size();
  NIBBLE_RETURN_IF_ERROR(writer.plan_shards(std::move(plan), shard_bytes));
  return writer;
}

Status CheckpointWriter::plan_shards(std::vector<TensorPlan> plan, int64_t shard_bytes) {
  shards_.emplace_back();
  int64_t filled = 0;
  for (TensorPlan& tensor : plan) {
    NIBBLE_ASSIGN_OR_RETURN(tensor.bytes, tensor_bytes(tensor.dtype, tensor.shape));
    if (!shards_.back().tensors.empty() && filled + tensor.bytes > shard_bytes) {
      shards_.emplace_back();
      filled = 0;
    }
    filled += tensor.bytes;
    shards_.back().tensors.push_back(std::move(tensor));
  }
  for (size_t shard = 0; shard < shards_.size(); ++shard) {
    std::vector<TensorPlan>& tensors = shards_[shard].tensors;
    std::sort(tensors.begin(), tensors.end(), reference_order);
    int64_t offset = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!places_.emplace(tensors[i].name, Place{.shard = shard, .tensor = i, .offset = offset})
               .second) {
        return make_error(StatusCode::kInvalidArgument, "tensor {} would be written twice",
                          tensors[i].name);
      }
      offset += tensors[i].bytes;
    }
  }
  return {};
}

std::string CheckpointWriter::shard_name(size_t shard) const {
  return shards_.size() == 1
             ? std::string("model.safetensors")
             : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards_.size());
}

Status CheckpointWriter::write(std::string_view name, std::span<const std::byte> data) {
  const auto found = places_.find(std::string(name));
  CHECK_MSG(found != places_.end(), "tensor {} is not expected", name);
  const Place& place = found->second;
  CHECK_EQ(static_cast<int64_t>(data.size()), shards_[place.shard].tensors[place.tensor].bytes);
  return write_part(name, data);
}

Status CheckpointWriter::write_part(std::string_view name, std::span<const std::byte> part) {
  const auto found = places_.find(std::string(name));
  CHECK_MSG(found != places_.end() && !found->second.complete, "tensor {} is not expected", name);
  Place& place = found->second;
  Shard& shard = shards_[place.shard];
  const int64_t bytes = shard.tensors[place.tensor].bytes;
  const auto size = static_cast<int64_t>(part.size());
  CHECK_LE(place.written + size, bytes);
  if (!shard.file) {
    NIBBLE_ASSIGN_OR_RETURN(
        shard.file, OutputFile::create(fmt::format("{}/{}", folder_, shard_name(place.shard))));
    NIBBLE_RETURN_IF_ERROR(shard.file->write(safetensors_header(shard.tensors)));
    shard.data_begin = shard.file->bytes_written();
  }
  NIBBLE_RETURN_IF_ERROR(
      shard.file->write_at(shard.data_begin + place.offset + place.written, part));
  place.written += size;
  if (place.written < bytes) {
    return {};
  }
  place.complete = true;
  --missing_;
  if (++shard.written == shard.tensors.size()) {
    NIBBLE_RETURN_IF_ERROR(shard.file->finish());
    bytes_written_ += shard.file->bytes_written();
    shard.file.reset();
  }
  return {};
}

Status CheckpointWriter::write_index() {
  int64_t total = 0;
  for (const Shard& shard : shards_) {
    for (const TensorPlan& tensor : shard.tensors) {
      total += tensor.bytes;
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file,
                          OutputFile::create(folder_ + "/model.safetensors.index.json"));
  std::string text = fmt::format(
      "{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{", total);
  std::string_view separator = "\n    ";
  for (size_t shard = 0; shard < shards_.size(); ++shard) {
    for (const TensorPlan& tensor : shards_[shard].tensors) {
      text += separator;
      append_json_string(text, tensor.name);
      text += fmt::format(": \"{}\"", shard_name(shard));
      separator = ",\n    ";
    }
    NIBBLE_RETURN_IF_ERROR(file.write(text));
    text.clear();
  }
  NIBBLE_RETURN_IF_ERROR(file.write(std::string_view("\n  }\n}\n")));
  NIBBLE_RETURN_IF_ERROR(file.finish());
  bytes_written_ += file.bytes_written();
  return {};
}

Status CheckpointWriter::finish() {
  CHECK_EQ(missing_, size_t{0});
  return shards_.size() > 1 ? write_index() : Status();
}

}  // namespace nibble
