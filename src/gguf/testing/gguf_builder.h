#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gguf/metadata.h"
#include "gguf/types.h"

namespace nibble::gguf {

/// The number that the format gives the type of a value.
template <typename T>
constexpr ValueType value_type_of() {
  if constexpr (std::same_as<T, bool>) {
    return ValueType::kBool;
  } else if constexpr (std::convertible_to<T, std::string_view>) {
    return ValueType::kString;
  } else if constexpr (std::floating_point<T>) {
    return sizeof(T) == 4 ? ValueType::kF32 : ValueType::kF64;
  } else {
    constexpr bool kSigned = std::is_signed_v<T>;
    switch (sizeof(T)) {
      case 1:
        return kSigned ? ValueType::kI8 : ValueType::kU8;
      case 2:
        return kSigned ? ValueType::kI16 : ValueType::kU16;
      case 4:
        return kSigned ? ValueType::kI32 : ValueType::kU32;
      default:
        return kSigned ? ValueType::kI64 : ValueType::kU64;
    }
  }
}

/// Little-endian bytes, and strings with their length in front.
class GgufBytes final {
 public:
  template <typename T>
  GgufBytes& put(const T& value) {
    if constexpr (std::convertible_to<T, std::string_view>) {
      const std::string_view text = value;
      put(uint64_t{text.size()});
      bytes.append(text);
    } else {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
    }
    return *this;
  }
  std::string bytes;
};

/// Writes GGUF files for tests, also ones that violate the format.
class GgufBuilder final {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;  // that the data is laid out by; any other than 32 needs its key, too
  std::optional<uint64_t> tensor_count, entry_count;  // instead of the true ones

  template <typename T>
  GgufBuilder& add(std::string_view key, const T& value) {
    return add_raw(key, static_cast<uint32_t>(value_type_of<T>()), GgufBytes().put(value).bytes);
  }
  template <typename T>
  GgufBuilder& add_array(std::string_view key, const std::vector<T>& values) {
    GgufBytes raw;
    raw.put(value_type_of<T>()).put(uint64_t{values.size()});
    for (const auto& value : values) {
      raw.put(static_cast<T>(value));
    }
    return add_raw(key, static_cast<uint32_t>(ValueType::kArray), raw.bytes);
  }
  /// Any type number, followed by any bytes.
  GgufBuilder& add_raw(std::string_view key, uint32_t type, std::string_view bytes) {
    entries_.put(key).put(type).bytes.append(bytes);
    ++entries_written_;
    return *this;
  }
  GgufBuilder& set_alignment(uint32_t value) {
    alignment = value;
    return add("general.alignment", value);
  }
  /// What each part of a split set says of the set; `number` counts from 0.
  GgufBuilder& set_split(uint16_t number, uint16_t count, int32_t tensors) {
    return add("split.no", number).add("split.count", count).add("split.tensors.count", tensors);
  }

  /// `shape` with the slowest dimension first; `data` are its blocks.
  GgufBuilder& add_tensor(std::string_view name,
                          Type type,
                          const std::vector<int64_t>& shape,
                          std::span<const std::byte> data) {
    const std::vector<uint64_t> dimensions(shape.rbegin(), shape.rend());
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    add_raw_tensor(name, dimensions, static_cast<uint32_t>(type), data_.size());
    data_.append(reinterpret_cast<const char*>(data.data()), data.size());
    return *this;
  }
  /// A tensor of F32.
  GgufBuilder& add_floats(std::string_view name,
                          const std::vector<int64_t>& shape,
                          const std::vector<float>& values) {
    return add_tensor(name, Type::kF32, shape, std::as_bytes(std::span(values)));
  }
  /// Any description, fastest dimension first, without data of its own.
  GgufBuilder& add_raw_tensor(std::string_view name,
                              const std::vector<uint64_t>& dimensions,
                              uint32_t type,
                              uint64_t offset) {
    tensors_.put(name).put(static_cast<uint32_t>(dimensions.size()));
    for (const uint64_t size : dimensions) {
      tensors_.put(size);
    }
    tensors_.put(type).put(offset);
    ++tensors_written_;
    return *this;
  }

  [[nodiscard]] std::string build() const {
    GgufBytes file;
    file.bytes = "GGUF";
    file.put(version).put(tensor_count.value_or(tensors_written_));
    file.put(entry_count.value_or(entries_written_));
    file.bytes += entries_.bytes + tensors_.bytes;
    if (!data_.empty()) {
      file.bytes.resize((file.bytes.size() + alignment - 1) / alignment * alignment);
    }
    return file.bytes + data_;
  }
  void write(const std::string& path) const {
    const std::string bytes = build();
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
  }

 private:
  GgufBytes entries_, tensors_;
  uint64_t entries_written_ = 0, tensors_written_ = 0;
  std::string data_;
};

}  // namespace nibble::gguf
