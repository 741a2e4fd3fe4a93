#include "checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include <sys/stat.h>

#include "base/json.h"
#include "base/json_events.h"
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

using WeightMap = std::vector<std::pair<std::string, std::string>>;  // name -> file

bool is_file_of_folder(std::string_view file) {
  return !file.empty() && file.find('/') == std::string_view::npos;
}

/// An index in the usual form, without a tree of it; stops at whatever else there is.
class IndexReader final : public JsonEvents {
 public:
  bool object_begin() override { return ++depth_ <= 2; }
  bool object_end() override {
    --depth_;
    return true;
  }
  bool array_begin() override { return false; }
  bool array_end() override { return false; }
  bool key(std::string_view text) override {
    if (depth_ == 1) {
      in_map_ = text == "weight_map";
      if (in_map_ && !entries_.empty()) {
        return false;  // a second one
      }
    }
    name_ = text;
    return true;
  }
  bool string(std::string_view text) override {
    if (depth_ == 2 && in_map_) {
      entries_.emplace_back(std::move(name_), text);
      return is_file_of_folder(text);
    }
    return depth_ == 2;
  }
  bool integer(int64_t) override { return depth_ == 2 && !in_map_; }
  bool other() override { return depth_ == 2 && !in_map_; }

  WeightMap take() { return std::move(entries_); }

 private:
  WeightMap entries_;
  std::string name_;
  int depth_ = 0;
  bool in_map_ = false;
};

// Checked: names stay inside the folder.
Result<WeightMap> read_weight_map(const std::string& index_path) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(index_path));
  IndexReader usual;
  if (read_json_events(text, usual)) {
    WeightMap entries = usual.take();
    if (!entries.empty()) {
      return entries;
    }
  }
  auto json = Json::parse(text);
  if (!json.ok()) {
    return json.status().with_context(kIndexFile);
  }
  const Json* map = json->find("weight_map");
  if (map == nullptr || !map->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: field weight_map is missing or no object",
                      kIndexFile);
  }
  WeightMap entries;
  for (const auto& [name, file] : map->as_object()) {
    if (!file.is_string() || !is_file_of_folder(file.as_string())) {
      return make_error(StatusCode::kCorrupt,
                        "{}: weight_map entry \"{}\" is not the name of a file in the same folder",
                        kIndexFile, name);
    }
    entries.emplace_back(name, file.as_string());
  }
  return entries;
}

/// The bytes of tensors, without seams where they follow each other.
std::vector<std::span<const std::byte>> joined(std::span<const TensorInfo* const> tensors) {
  std::vector<std::span<const std::byte>> parts;
  parts.reserve(tensors.size());
  for (const TensorInfo* tensor : tensors) {
    if (!tensor->data.empty()) {
      parts.push_back(tensor->data);
    }
  }
  std::ranges::sort(parts, std::less<>(), [](const auto& part) { return part.data(); });
  size_t count = 0;
  for (const auto& part : parts) {
    std::span<const std::byte>* last = count == 0 ? nullptr : &parts[count - 1];
    if (last != nullptr && last->data() + last->size() == part.data()) {
      *last = {last->data(), last->size() + part.size()};
    } else {
      parts[count++] = part;
    }
  }
  parts.resize(count);
  return parts;
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
  by_name_.reserve(by_name_.size() + shards_.back().content.tensors.size());
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
  by_name_.reserve(weight_map.size());
  order_.reserve(weight_map.size());
  for (const std::string& file : files) {
    NIBBLE_RETURN_IF_ERROR(add_file(folder + "/" + file));
  }
  return check_index(weight_map);
}

Status CheckpointReader::check_index(
    const std::vector<std::pair<std::string, std::string>>& weight_map) const {
  std::vector<const TensorInfo*> named;
  named.reserve(weight_map.size());
  for (const auto& [name, file] : weight_map) {
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr || file_of(*tensor) != file) {
      return make_error(StatusCode::kCorrupt, "{}: tensor {} is said to be in {}, but is {}{}",
                        kIndexFile, name, file, tensor == nullptr ? "in no shard" : "in ",
                        tensor == nullptr ? std::string_view() : file_of(*tensor));
    }
    named.push_back(tensor);
  }
  std::ranges::sort(named);
  if (const auto twice = std::ranges::adjacent_find(named); twice != named.end()) {
    return make_error(StatusCode::kCorrupt, "{}: JSON: key \"{}\" appears twice in one object",
                      kIndexFile, (*twice)->name);
  }
  for (const TensorInfo* tensor : order_) {
    if (!std::ranges::binary_search(named, tensor) && !is_rope_frequencies(tensor->name)) {
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

void CheckpointReader::read_ahead(std::span<const TensorInfo* const> tensors) const {
  for (const std::span<const std::byte> part : joined(tensors)) {
    read_ahead(part);
  }
}

void CheckpointReader::drop_pages(std::span<const TensorInfo* const> tensors) const {
  for (const std::span<const std::byte> part : joined(tensors)) {
    drop_pages(part);
  }
}

void CheckpointReader::drop_all_pages() const {
  for (const Shard& shard : shards_) {
    shard.file.drop_pages(shard.file.bytes());
  }
}

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
