#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace nibble::gguf {

/// Types of metadata, with the numbers of the format.
enum class ValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

/// One value, or the elements of one array, where they lie in the file.
struct Value {
  ValueType type = ValueType::kU8;  // of an array: that of its elements; never kArray
  bool is_array = false;
  int64_t count = 1;  // elements of an array
  std::span<const std::byte> data;

  /// "a string", "an array of u32": for messages.
  [[nodiscard]] std::string type_name() const;
};

/// The metadata of a file, checked by parse_gguf(); keys and strings point into the file. Values
/// are text, numbers and arrays of these. The require functions fail (kCorrupt, naming file, key
/// and types) where a key is missing or its value has another type; the optional ones give the
/// fallback where it is missing. Strings need not be UTF-8: tokens can be any bytes.
class Metadata final {
 public:
  using Entry = std::pair<std::string_view, Value>;

  explicit Metadata(std::string where) : where_(std::move(where)) {}
  /// False if the key is there already.
  bool add(std::string_view key, const Value& value);

  [[nodiscard]] const Value* find(std::string_view key) const;
  [[nodiscard]] const std::vector<Entry>& entries() const { return entries_; }  // in file order
  [[nodiscard]] const std::string& where() const { return where_; }             // the file
  /// Errors "FILE: key KEY: WHAT", for whoever knows what a value must be.
  [[nodiscard]] Status corrupt(std::string_view key, std::string_view what) const;
  [[nodiscard]] Status unsupported(std::string_view key, std::string_view what) const;

  [[nodiscard]] Result<std::string_view> require_string(std::string_view key) const;
  /// An integer of any type; negative ones are errors.
  [[nodiscard]] Result<uint64_t> require_uint(std::string_view key) const;
  /// A number of any type.
  [[nodiscard]] Result<double> require_float(std::string_view key) const;
  [[nodiscard]] Result<bool> require_bool(std::string_view key) const;
  [[nodiscard]] Result<std::string_view> optional_string(std::string_view key,
                                                         std::string_view fallback) const;
  [[nodiscard]] Result<uint64_t> optional_uint(std::string_view key, uint64_t fallback) const;
  /// Sizes and tokens: kCorrupt from 2^31 on.
  [[nodiscard]] Result<int64_t> require_count(std::string_view key) const;
  [[nodiscard]] Result<int64_t> optional_count(std::string_view key, int64_t fallback) const;
  [[nodiscard]] Result<double> optional_float(std::string_view key, double fallback) const;
  [[nodiscard]] Result<bool> optional_bool(std::string_view key, bool fallback) const;

  /// Arrays; of a missing optional one, find() tells.
  [[nodiscard]] Result<std::vector<std::string_view>> require_strings(std::string_view key) const;
  /// Integers of any type that fit int64; booleans are 0 and 1.
  [[nodiscard]] Result<std::vector<int64_t>> require_ints(std::string_view key) const;
  /// Numbers of any type, rounded to the nearest float.
  [[nodiscard]] Result<std::vector<float>> require_floats(std::string_view key) const;

 private:
  [[nodiscard]] Result<const Value*> require(std::string_view key) const;
  [[nodiscard]] Status wrong_type(std::string_view key,
                                  std::string_view expected,
                                  const Value& value) const;
  [[nodiscard]] Result<const Value*> require_array(std::string_view key,
                                                   std::string_view expected) const;

  std::string where_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string_view, size_t> index_;
};

/// Bytes of one value; 0 for strings, whose lengths differ, and arrays.
[[nodiscard]] int64_t value_bytes(ValueType type);
/// "u32".
[[nodiscard]] std::string_view value_type_name(ValueType type);

}  // namespace nibble::gguf
