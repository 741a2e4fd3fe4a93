#include "gguf/file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include <fmt/ranges.h>

#include "base/utf8.h"
#include "gguf/cursor.h"

namespace nibble::gguf {
namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr std::string_view kAlignmentKey = "general.alignment";
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint32_t kMaxDimensions = 4;    // GGML_MAX_DIMS
constexpr size_t kMaxNameBytes = 65535;   // the format's limit for keys
constexpr uint64_t kSmallestEntry = 13;   // length of the key, type, one byte
constexpr uint64_t kSmallestTensor = 24;  // length of the name, dimensions, type, offset

struct Header {
  uint32_t version = 0;
  uint64_t tensors = 0;
  uint64_t entries = 0;
};

// Where a tensor's data lies from the start of all tensors' data.
struct Placed {
  size_t tensor = 0;
  uint64_t begin = 0;
  uint64_t bytes = 0;
};

template <typename... Args>
Status corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return Status(StatusCode::kCorrupt, fmt::format(format, std::forward<Args>(args)...));
}

Status check_version(uint32_t version) {
  if (version == 2 || version == 3) {
    return {};
  }
  if (version != 0 && (version & 0xffffU) == 0) {
    return make_error(StatusCode::kUnsupported,
                      "the file is big-endian (its version reads as {:#x}); use a little-endian "
                      "file of the model, or convert it with gguf-py's gguf_convert_endian.py",
                      version);
  }
  if (version == 1) {
    return Status(StatusCode::kUnsupported,
                  "GGUF version 1 is not read, only 2 and 3; convert the model again with a "
                  "current converter, or download a newer file of it");
  }
  return make_error(StatusCode::kUnsupported,
                    "GGUF version {} is not read, only 2 and 3: the file is newer than this "
                    "program, or damaged; download it again or use a newer build",
                    version);
}

Result<Header> read_header(Cursor& cursor) {
  NIBBLE_ASSIGN_OR_RETURN(const auto magic, cursor.take(kMagic.size(), "the magic number"));
  if (!is_gguf(magic)) {
    std::array<uint8_t, kMagic.size()> bytes;
    std::memcpy(bytes.data(), magic.data(), bytes.size());
    return corrupt("not a GGUF file: it begins with the bytes {:02x} instead of \"GGUF\"",
                   fmt::join(bytes, " "));
  }
  Header header;
  NIBBLE_ASSIGN_OR_RETURN(header.version, cursor.number<uint32_t>("the version"));
  NIBBLE_RETURN_IF_ERROR(check_version(header.version));
  NIBBLE_ASSIGN_OR_RETURN(header.tensors, cursor.count(kSmallestTensor, "tensors"));
  NIBBLE_ASSIGN_OR_RETURN(header.entries, cursor.count(kSmallestEntry, "keys of metadata"));
  return header;
}

Result<std::string_view> read_name(Cursor& cursor, std::string_view what) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view name, cursor.string(what));
  if (name.empty() || name.size() > kMaxNameBytes || !is_utf8(name)) {
    return corrupt("{} at byte {} ({} bytes) is {}; the file is damaged: download it again", what,
                   cursor.at() - name.size(), name.size(),
                   name.empty()                  ? "empty"
                   : name.size() > kMaxNameBytes ? "longer than 65,535 bytes"
                                                 : "not UTF-8");
  }
  return name;
}

Result<ValueType> read_value_type(Cursor& cursor) {
  NIBBLE_ASSIGN_OR_RETURN(const uint32_t number, cursor.number<uint32_t>("the type"));
  if (number > static_cast<uint32_t>(ValueType::kF64)) {
    return corrupt("value type {} is unknown; the file is damaged: download it again", number);
  }
  return static_cast<ValueType>(number);
}

Status check_bools(std::span<const std::byte> values) {
  const auto bad = std::ranges::find_if(values, [](std::byte byte) { return byte > std::byte{1}; });
  return bad == values.end()
             ? Status()
             : corrupt("a bool is {}, neither 0 nor 1; the file is damaged: download it again",
                       std::to_integer<int>(*bad));
}

// The elements of an array whose type and number are known, or a single value.
Status read_elements(Cursor& cursor, Value& value) {
  const uint64_t begin = cursor.at();
  const auto size = static_cast<uint64_t>(value_bytes(value.type));
  NIBBLE_RETURN_IF_ERROR(
      cursor.check_count(static_cast<uint64_t>(value.count), size == 0 ? 8 : size, "elements"));
  if (value.type == ValueType::kString) {
    for (int64_t i = 0; i < value.count; ++i) {
      auto text = cursor.string("a string");
      if (!text.ok()) {
        return value.is_array ? text.status().with_context(fmt::format("element {}", i))
                              : text.status();
      }
    }
  } else {
    NIBBLE_RETURN_IF_ERROR(
        cursor.take(static_cast<uint64_t>(value.count) * size, "the value").status());
  }
  value.data = cursor.since(begin);
  return value.type == ValueType::kBool ? check_bools(value.data) : Status();
}

Result<Value> read_value(Cursor& cursor) {
  Value value;
  NIBBLE_ASSIGN_OR_RETURN(value.type, read_value_type(cursor));
  if (value.type == ValueType::kArray) {
    value.is_array = true;
    NIBBLE_ASSIGN_OR_RETURN(value.type, read_value_type(cursor));
    if (value.type == ValueType::kArray) {
      return Status(StatusCode::kUnsupported,
                    "arrays of arrays are not supported; convert the model again with a converter "
                    "that writes none");
    }
    NIBBLE_ASSIGN_OR_RETURN(const uint64_t count, cursor.count(1, "elements"));
    value.count = static_cast<int64_t>(count);  // not above the file's size
  }
  NIBBLE_RETURN_IF_ERROR(read_elements(cursor, value));
  return value;
}

Status read_metadata(Cursor& cursor, uint64_t count, Metadata& metadata) {
  for (uint64_t i = 0; i < count; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view key, read_name(cursor, "a key of metadata"));
    auto value = read_value(cursor);
    if (!value.ok()) {
      return value.status().with_context(fmt::format("metadata {}", key));
    }
    if (!metadata.add(key, *value)) {
      return corrupt("metadata {} is there twice; convert the model again", key);
    }
  }
  return {};
}

Result<uint64_t> read_alignment(const Metadata& metadata) {
  const Value* value = metadata.find(kAlignmentKey);
  if (value == nullptr) {
    return kDefaultAlignment;
  }
  if (value->is_array || value->type != ValueType::kU32) {
    return corrupt(
        "metadata {}: expected u32, got {}; convert the model again with a current "
        "converter",
        kAlignmentKey, value->type_name());
  }
  uint32_t alignment = 0;
  std::memcpy(&alignment, value->data.data(), sizeof(alignment));
  if (!std::has_single_bit(alignment)) {
    return corrupt(
        "metadata {} is {}, but must be a power of two; the file is damaged: download it again",
        kAlignmentKey, alignment);
  }
  return uint64_t{alignment};
}

Status read_shape(Cursor& cursor, Tensor& tensor) {
  NIBBLE_ASSIGN_OR_RETURN(const uint32_t dimensions,
                          cursor.number<uint32_t>("the number of dimensions"));
  if (dimensions > kMaxDimensions) {
    return corrupt(
        "{} dimensions, but at most {} are allowed; the file is damaged: download it "
        "again",
        dimensions, kMaxDimensions);
  }
  tensor.shape.resize(dimensions);
  for (uint32_t i = 0; i < dimensions; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const auto size, cursor.number<int64_t>("a dimension"));
    if (size <= 0) {
      return corrupt(
          "dimension {} is {}, but must be from 1 to 2^63 - 1; the file is damaged: "
          "download it again",
          i, static_cast<uint64_t>(size));
    }
    tensor.shape[dimensions - 1 - i] = size;
  }
  return {};
}

// Bytes of the tensor's data.
Result<uint64_t> data_bytes(const Tensor& tensor) {
  const TypeTraits& traits = type_traits(tensor.type);
  const int64_t row = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (row % traits.elements != 0) {
    return corrupt(
        "rows of {} elements are no whole number of {} blocks of {}; the file is "
        "damaged: download it again",
        row, traits.name, traits.elements);
  }
  int64_t bytes = row / traits.elements;
  bool overflow = __builtin_mul_overflow(bytes, traits.bytes, &bytes);
  int64_t elements = 1;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    overflow |= __builtin_mul_overflow(elements, tensor.shape[i], &elements);
    overflow |=
        i + 1 < tensor.shape.size() && __builtin_mul_overflow(bytes, tensor.shape[i], &bytes);
  }
  if (overflow) {
    return corrupt("shape [{}] overflows; the file is damaged: download it again",
                   fmt::join(tensor.shape, ", "));
  }
  return static_cast<uint64_t>(bytes);
}

// What follows a tensor's name.
Result<Placed> read_tensor(Cursor& cursor, Tensor& tensor) {
  NIBBLE_RETURN_IF_ERROR(read_shape(cursor, tensor));
  NIBBLE_ASSIGN_OR_RETURN(const uint32_t number, cursor.number<uint32_t>("the type"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.type, type_from_number(number));
  Placed placed;
  NIBBLE_ASSIGN_OR_RETURN(placed.begin, cursor.number<uint64_t>("the offset"));
  NIBBLE_ASSIGN_OR_RETURN(placed.bytes, data_bytes(tensor));
  return placed;
}

Result<std::vector<Placed>> read_tensors(Cursor& cursor, uint64_t count, Content& content) {
  std::vector<Placed> places;
  for (uint64_t i = 0; i < count; ++i) {
    Tensor tensor;
    NIBBLE_ASSIGN_OR_RETURN(tensor.name, read_name(cursor, "the name of a tensor"));
    auto placed = read_tensor(cursor, tensor);
    if (!placed.ok()) {
      return placed.status().with_context(fmt::format("tensor {}", tensor.name));
    }
    placed->tensor = places.size();
    places.push_back(*placed);
    const std::string_view name = tensor.name;
    if (!content.add(std::move(tensor))) {
      return corrupt("tensor {} is there twice; download the file again", name);
    }
  }
  return places;
}

// Gaps are allowed: the format demands alignment, not that nothing lies between.
Status place_tensors(std::span<const std::byte> file,
                     uint64_t header_end,
                     std::vector<Placed>& places,
                     Content& content) {
  const uint64_t padding = (0 - header_end) & (content.alignment - 1);
  const bool has_data = header_end <= file.size() && padding <= file.size() - header_end;
  const auto data = has_data ? file.subspan(header_end + padding) : std::span<const std::byte>();
  std::ranges::stable_sort(places, {}, &Placed::begin);
  const Placed* previous = nullptr;
  for (const Placed& placed : places) {
    Tensor& tensor = content.tensors()[placed.tensor];
    if (placed.begin % content.alignment != 0) {
      return corrupt(
          "tensor {}: its data begins at {}, which is no multiple of the alignment {}; "
          "the file is damaged: download it again",
          tensor.name, placed.begin, content.alignment);
    }
    if (placed.begin > data.size() || placed.bytes > data.size() - placed.begin) {
      return corrupt(
          "tensor {}: its {} bytes at {} do not fit the {} bytes of data; the file is "
          "cut off: download it again",
          tensor.name, placed.bytes, placed.begin, data.size());
    }
    if (previous != nullptr && previous->begin + previous->bytes > placed.begin) {
      return corrupt(
          "tensor {}: its data begins at {}, within that of {}; the file is damaged: "
          "download it again",
          tensor.name, placed.begin, content.tensors()[previous->tensor].name);
    }
    tensor.data = data.subspan(placed.begin, placed.bytes);
    previous = &placed;
  }
  return {};
}

Status parse(std::span<const std::byte> file, Content& content) {
  Cursor cursor(file);
  NIBBLE_ASSIGN_OR_RETURN(const Header header, read_header(cursor));
  content.version = header.version;
  NIBBLE_RETURN_IF_ERROR(read_metadata(cursor, header.entries, content.metadata));
  NIBBLE_ASSIGN_OR_RETURN(content.alignment, read_alignment(content.metadata));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Placed> places,
                          read_tensors(cursor, header.tensors, content));
  return place_tensors(file, cursor.at(), places, content);
}

}  // namespace

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) {
    count *= size;
  }
  return count;
}

bool Content::add(Tensor tensor) {
  if (!index_.emplace(tensor.name, tensors_.size()).second) {
    return false;
  }
  tensors_.push_back(std::move(tensor));
  return true;
}

const Tensor* Content::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

bool is_gguf(std::span<const std::byte> file) {
  return file.size() >= kMagic.size() &&
         std::memcmp(file.data(), kMagic.data(), kMagic.size()) == 0;
}

Result<Content> parse_gguf(std::span<const std::byte> file, std::string_view where) {
  Content content{std::string(where)};
  const Status status = parse(file, content);
  if (!status.ok()) {
    return status.with_context(where);
  }
  return content;
}

}  // namespace nibble::gguf
