#include "checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <unordered_set>
#include <utility>

#include <sys/stat.h>

#include "base/json.h"
#include "checkpoint/gguf_tensors.h"
#include "gguf/split.h"

namespace nibble {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

// What to give instead of a folder without safetensors: of its GGUF files the first by name.
std::string remedy_without_weights(const std::string& folder) {
  std::string first;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".gguf") && (first.empty() || name < first)) {
      first = name;
    }
  }
  return first.empty() ? "give the folder of a safetensors model, or a GGUF file"
                       : fmt::format("give the GGUF file itself: {}/{}", folder, first);
}

bool is_directory(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// name -> file, checked: names stay inside the folder.
Result<std::vector<std::pair<std::string, std::string>>> read_weight_map(
    const std::string& index_path) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(index_path));
  auto json = Json::parse(text);
  if (!json.ok()) {
    return json.status().with_context(kIndexFile);
  }
  const Json* map = json->find("weight_map");
  if (map == nullptr || !map->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: field weight_map is missing or no object",
                      kIndexFile);
  }
  std::vector<std::pair<std::string, std::string>> entries;
  for (const auto& [name, file] : map->as_object()) {
    if (!file.is_string() || file.as_string().empty() ||
        file.as_string().find('/') != std::string::npos) {
      return make_error(StatusCode::kCorrupt,
                        "{}: weight_map entry \"{}\" is not the name of a file in the same folder",
                        kIndexFile, name);
    }
    entries.emplace_back(name, file.as_string());
  }
  return entries;
}

}  // namespace

bool is_rope_frequencies(std::string_view tensor) {
  return tensor.ends_with(".rotary_emb.inv_freq");
}

Status CheckpointReader::add_file(const std::string& path) {
  auto mapped = MappedFile::open(path);
  if (!mapped.ok()) {
    return mapped.status();
  }
  NIBBLE_ASSIGN_OR_RETURN(SafetensorsContent content,
                          parse_safetensors(mapped->bytes(), file_name(path)));
  mapped->drop_pages(mapped->bytes());  // the header has been read
  shards_.push_back({std::move(*mapped), std::move(content)});
  return enter_tensors();
}

// Those of the last shard.
Status CheckpointReader::enter_tensors() {
  const std::string& path = shards_.back().file.path();
  for (const TensorInfo& tensor : shards_.back().content.tensors) {
    const auto [found, inserted] = by_name_.emplace(tensor.name, &tensor);
    if (!inserted) {
      return make_error(StatusCode::kCorrupt, "{}: tensor {} is also in {}", file_name(path),
                        tensor.name, file_of(*found->second));
    }
    order_.push_back(&tensor);
  }
  return {};
}

Status CheckpointReader::open_gguf(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(gguf::FileSet files, gguf::FileSet::open(path));
  const gguf::Metadata metadata = files.metadata();
  std::vector<gguf::Part> parts = std::move(files).take_parts();
  shards_.reserve(parts.size());
  for (gguf::Part& part : parts) {
    NIBBLE_ASSIGN_OR_RETURN(SafetensorsContent content, list_gguf_tensors(metadata, part.content));
    shards_.push_back({std::move(part.file), std::move(content)});
    NIBBLE_RETURN_IF_ERROR(enter_tensors());
  }
  return {};
}

Status CheckpointReader::open_sharded(const std::string& folder, const std::string& index_path) {
  NIBBLE_ASSIGN_OR_RETURN(const auto weight_map, read_weight_map(index_path));
  std::set<std::string> files;
  for (const auto& entry : weight_map) {
    files.insert(entry.second);
  }
  for (const std::string& file : files) {
    const std::string path = folder + "/" + file;
    if (!file_exists(path)) {
      return make_error(StatusCode::kNotFound, "{}: shard {} of {} is missing; download it into {}",
                        kIndexFile, file, files.size(), folder);
    }
  }
  shards_.reserve(files.size());
  for (const std::string& file : files) {
    NIBBLE_RETURN_IF_ERROR(add_file(folder + "/" + file));
  }
  std::unordered_set<std::string_view> named;
  for (const auto& [name, file] : weight_map) {
    named.insert(name);
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr || file_of(*tensor) != file) {
      return make_error(StatusCode::kCorrupt, "{}: tensor {} is said to be in {}, but is {}{}",
                        kIndexFile, name, file, tensor == nullptr ? "in no shard" : "in ",
                        tensor == nullptr ? std::string_view() : file_of(*tensor));
    }
  }
  for (const TensorInfo* tensor : order_) {
    if (!named.contains(tensor->name) && !is_rope_frequencies(tensor->name)) {
      return make_error(StatusCode::kCorrupt,
                        "{}: does not name this tensor, so programs disagree whether it is part of "
                        "the model: {}; add it to weight_map, or take it out of the file",
                        kIndexFile, where(*tensor));
    }
  }
  return {};
}

Result<CheckpointReader> CheckpointReader::open(const std::string& path) {
  CheckpointReader reader;
  reader.path_ = path;
  if (!file_exists(path)) {
    return make_error(StatusCode::kNotFound, "{}: no such file or folder", path);
  }
  if (!is_directory(path)) {
    if (gguf::is_gguf_path(path)) {
      NIBBLE_RETURN_IF_ERROR(reader.open_gguf(path));
      return reader;
    }
    NIBBLE_RETURN_IF_ERROR(reader.add_file(path));
    return reader;
  }
  const std::string index = fmt::format("{}/{}", path, kIndexFile);
  const std::string single = fmt::format("{}/{}", path, kSingleFile);
  if (file_exists(index)) {
    NIBBLE_RETURN_IF_ERROR(reader.open_sharded(path, index));
  } else if (file_exists(single)) {
    NIBBLE_RETURN_IF_ERROR(reader.add_file(single));
  } else {
    return make_error(StatusCode::kNotFound, "{}: holds neither {} nor {}; {}", path, kSingleFile,
                      kIndexFile, remedy_without_weights(path));
  }
  return reader;
}

const TensorInfo* CheckpointReader::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

Result<const TensorInfo*> CheckpointReader::require(std::string_view name) const {
  const TensorInfo* tensor = find(name);
  if (tensor == nullptr) {
    return make_error(StatusCode::kNotFound,
                      "{}: has no tensor {}; it was cut from the checkpoint, or config.json "
                      "describes another model",
                      path_, name);
  }
  return tensor;
}

const CheckpointReader::Shard& CheckpointReader::shard_of(const TensorInfo& tensor) const {
  for (const Shard& shard : shards_) {
    const std::vector<TensorInfo>& tensors = shard.content.tensors;
    if (!tensors.empty() && &tensor >= &tensors.front() && &tensor <= &tensors.back()) {
      return shard;
    }
  }
  CHECK_MSG(false, "tensor {} belongs to another reader", tensor.name);
  return shards_.front();
}

const std::string& CheckpointReader::path_of(const TensorInfo& tensor) const {
  return shard_of(tensor).file.path();
}

std::string_view CheckpointReader::file_of(const TensorInfo& tensor) const {
  return file_name(path_of(tensor));
}

const std::map<std::string, std::string>& CheckpointReader::metadata_of(
    const TensorInfo& tensor) const {
  return shard_of(tensor).content.metadata;
}

std::string CheckpointReader::where(const TensorInfo& tensor) const {
  return fmt::format("{}: tensor {}", file_of(tensor), tensor.name);
}

int64_t CheckpointReader::total_bytes() const {
  int64_t total = 0;
  for (const TensorInfo* tensor : order_) {
    total += static_cast<int64_t>(tensor->data.size());
  }
  return total;
}

const MappedFile* CheckpointReader::file_at(std::span<const std::byte> part) const {
  const auto holds = [&](std::span<const std::byte> bytes) {
    return !bytes.empty() && part.data() >= bytes.data() &&
           part.data() + part.size() <= bytes.data() + bytes.size();
  };
  for (const Shard& shard : shards_) {
    if (holds(shard.file.bytes())) {
      return &shard.file;
    }
    if (std::ranges::any_of(shard.content.joined, holds)) {
      return nullptr;
    }
  }
  CHECK_MSG(false, "{} bytes belong to no file of {}", part.size(), path_);
  return nullptr;
}

void CheckpointReader::read_ahead(const TensorInfo& tensor) const { read_ahead(tensor.data); }

void CheckpointReader::drop_pages(const TensorInfo& tensor) const { drop_pages(tensor.data); }

void CheckpointReader::read_ahead(std::span<const std::byte> part) const {
  if (const MappedFile* file = part.empty() ? nullptr : file_at(part)) {
    file->read_ahead(part);
  }
}

void CheckpointReader::drop_pages(std::span<const std::byte> part) const {
  if (const MappedFile* file = part.empty() ? nullptr : file_at(part)) {
    file->drop_pages(part);
  }
}

}  // namespace nibble
