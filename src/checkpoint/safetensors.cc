#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/ranges.h>

#include "base/json.h"
#include "checkpoint/foreign_file.h"
#include "checkpoint/safetensors_header.h"

namespace nibble {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadataKey = "__metadata__";

Status corrupt(std::string_view where, const std::string& what) {
  return make_error(StatusCode::kCorrupt, "{}: {}", where, what);
}

// What else the file is, if its first bytes tell.
Status check_foreign(std::span<const std::byte> file, std::string_view where) {
  const std::string foreign = describe_foreign_file(file, where);
  return foreign.empty() ? Status()
                         : corrupt(where, fmt::format("not a safetensors file, but {}", foreign));
}

Result<uint64_t> header_size(std::span<const std::byte> file, std::string_view where) {
  if (file.size() < 8) {
    return corrupt(where, fmt::format("only {} bytes: a safetensors file starts with an 8-byte "
                                      "header size; download it again",
                                      file.size()));
  }
  uint64_t size = 0;
  std::memcpy(&size, file.data(), 8);
  // Read as a number, the beginning of another format is nearly always too large.
  if (size > kMaxHeaderBytes || size > file.size() - 8) {
    NIBBLE_RETURN_IF_ERROR(check_foreign(file, where));
  }
  if (size > kMaxHeaderBytes) {
    return corrupt(where, fmt::format("header of {} bytes exceeds the limit of {}; this is no "
                                      "safetensors file, or it is damaged: download it again",
                                      size, kMaxHeaderBytes));
  }
  if (size > file.size() - 8) {
    return corrupt(where, fmt::format("header of {} bytes does not fit a file of {} bytes; the "
                                      "file is cut off: download it again",
                                      size, file.size()));
  }
  return size;
}

Result<std::map<std::string, std::string>> parse_metadata(const Json& json,
                                                          std::string_view where) {
  if (!json.is_object()) {
    return corrupt(where, "__metadata__ is not an object");
  }
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : json.as_object()) {
    if (!value.is_string()) {
      return corrupt(where, fmt::format("__metadata__ field \"{}\" is not a string", key));
    }
    metadata.emplace(key, value.as_string());
  }
  return metadata;
}

Result<std::vector<int64_t>> parse_integers(const Json& object, std::string_view key) {
  const Json* list = object.find(key);
  if (list == nullptr || !list->is_array()) {
    return make_error(StatusCode::kCorrupt, "field {} is missing or no list", key);
  }
  std::vector<int64_t> values;
  for (const Json& item : list->as_array()) {
    if (!item.is_int() || item.as_int() < 0) {
      return make_error(StatusCode::kCorrupt,
                        "field {} holds something other than non-negative integers", key);
    }
    values.push_back(item.as_int());
  }
  return values;
}

Result<HeaderEntry> parse_entry(const std::string& name, const Json& json) {
  HeaderEntry entry;
  entry.tensor.name = name;
  if (!json.is_object()) {
    return Status(StatusCode::kCorrupt, "its description is not an object");
  }
  const Json* dtype = json.find("dtype");
  if (dtype == nullptr || !dtype->is_string()) {
    return Status(StatusCode::kCorrupt, "field dtype is missing or no string");
  }
  const auto known = dtype_from_name(dtype->as_string());
  if (!known) {
    return make_error(StatusCode::kCorrupt, "unknown dtype \"{}\"", dtype->as_string());
  }
  entry.tensor.dtype = *known;
  NIBBLE_ASSIGN_OR_RETURN(entry.tensor.shape, parse_integers(json, "shape"));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, parse_integers(json, "data_offsets"));
  if (offsets.size() != 2) {
    return make_error(StatusCode::kCorrupt, "data_offsets has {} entries instead of 2",
                      offsets.size());
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  if (entry.end < entry.begin) {
    return make_error(StatusCode::kCorrupt, "data_offsets [{}, {}] run backwards", offsets[0],
                      offsets[1]);
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t bytes,
                          tensor_bytes(entry.tensor.dtype, entry.tensor.shape));
  if (bytes != entry.end - entry.begin) {
    return make_error(StatusCode::kCorrupt, "{} {} needs {} bytes but data_offsets span {}",
                      dtype->as_string(), shape_text(entry.tensor.shape), bytes,
                      entry.end - entry.begin);
  }
  return entry;
}

// Sorted by offset, the tensors must fill the data section exactly.
Status place_entries(std::vector<HeaderEntry>& entries,
                     std::span<const std::byte> data,
                     std::string_view where) {
  const auto before = [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  };
  if (!std::ranges::is_sorted(entries, before)) {
    std::ranges::sort(entries, before);
  }
  int64_t at = 0;
  for (HeaderEntry& entry : entries) {
    if (entry.begin != at) {
      return corrupt(where, fmt::format("tensor {}: its data begins at {} instead of {} ({})",
                                        entry.tensor.name, entry.begin, at,
                                        entry.begin < at ? "tensors overlap" : "there is a hole"));
    }
    at = entry.end;
    if (static_cast<uint64_t>(at) > data.size()) {
      return corrupt(where, fmt::format("tensor {}: its data ends at {} but the file has only {} "
                                        "data bytes; the file is cut off: download it again",
                                        entry.tensor.name, at, data.size()));
    }
    entry.tensor.data =
        data.subspan(static_cast<size_t>(entry.begin), static_cast<size_t>(at - entry.begin));
  }
  if (static_cast<uint64_t>(at) != data.size()) {
    return corrupt(where, fmt::format("{} bytes follow the last tensor",
                                      data.size() - static_cast<uint64_t>(at)));
  }
  return {};
}

/// A header that is not as writers give it: what it says all the same, or what is wrong with it.
Result<SafetensorsHeader> explain_header(std::span<const std::byte> file,
                                         std::string_view text,
                                         std::string_view where) {
  auto json = Json::parse(text);
  if (!json.ok()) {
    NIBBLE_RETURN_IF_ERROR(check_foreign(file, where));
    return json.status().with_context(fmt::format("{}: header", where));
  }
  if (!json->is_object()) {
    return corrupt(where, "the header is not a JSON object");
  }
  SafetensorsHeader header;
  header.entries.reserve(json->as_object().size());
  for (const auto& [name, value] : json->as_object()) {
    if (name == kMetadataKey) {
      NIBBLE_ASSIGN_OR_RETURN(header.metadata, parse_metadata(value, where));
      continue;
    }
    auto entry = parse_entry(name, value);
    if (!entry.ok()) {
      return entry.status().with_context(fmt::format("{}: tensor {}", where, name));
    }
    header.entries.push_back(std::move(*entry));
  }
  return header;
}

}  // namespace

int64_t TensorInfo::elements() const {
  int64_t count = 1;
  for (const int64_t dim : shape) {
    count *= dim;
  }
  return count;
}

std::string shape_text(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Result<int64_t> tensor_bytes(DType dtype, std::span<const int64_t> shape) {
  int64_t bits = dtype_bits(dtype);
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bits, dim, &bits)) {
      return make_error(StatusCode::kCorrupt, "shape {} is negative or overflows",
                        shape_text(shape));
    }
  }
  if (bits % 8 != 0) {
    return make_error(StatusCode::kCorrupt, "{} {} is {} bits, no whole number of bytes",
                      dtype_name(dtype), shape_text(shape), bits);
  }
  return bits / 8;
}

Result<SafetensorsContent> parse_safetensors(std::span<const std::byte> file,
                                             std::string_view where) {
  NIBBLE_ASSIGN_OR_RETURN(const uint64_t size, header_size(file, where));
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8, size);
  std::optional<SafetensorsHeader> header = read_usual_header(text);
  if (!header) {
    NIBBLE_ASSIGN_OR_RETURN(header, explain_header(file, text, where));
  }
  NIBBLE_RETURN_IF_ERROR(place_entries(header->entries, file.subspan(8 + size), where));
  SafetensorsContent content;
  content.metadata = std::move(header->metadata);
  content.tensors.reserve(header->entries.size());
  for (HeaderEntry& entry : header->entries) {
    content.tensors.push_back(std::move(entry.tensor));
  }
  return content;
}

}  // namespace nibble
