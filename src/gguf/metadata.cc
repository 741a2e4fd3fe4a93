#include "gguf/metadata.h"

#include <cstring>
#include <limits>
#include <optional>
#include <variant>

namespace nibble::gguf {
namespace {

template <typename T>
T load(const std::byte* in) {
  T value;
  std::memcpy(&value, in, sizeof(T));
  return value;
}

using Number = std::variant<uint64_t, int64_t, double>;

// A number as the widest type of its kind; nothing for strings.
std::optional<Number> load_number(ValueType type, const std::byte* in) {
  switch (type) {
    case ValueType::kU8:
      return uint64_t{load<uint8_t>(in)};
    case ValueType::kI8:
      return int64_t{load<int8_t>(in)};
    case ValueType::kU16:
      return uint64_t{load<uint16_t>(in)};
    case ValueType::kI16:
      return int64_t{load<int16_t>(in)};
    case ValueType::kU32:
      return uint64_t{load<uint32_t>(in)};
    case ValueType::kI32:
      return int64_t{load<int32_t>(in)};
    case ValueType::kF32:
      return double{load<float>(in)};
    case ValueType::kBool:
      return uint64_t{load<uint8_t>(in)};
    case ValueType::kU64:
      return load<uint64_t>(in);
    case ValueType::kI64:
      return load<int64_t>(in);
    case ValueType::kF64:
      return load<double>(in);
    case ValueType::kString:
    case ValueType::kArray:
      break;
  }
  return std::nullopt;
}

std::optional<Number> scalar_number(const Value& value) {
  return value.is_array ? std::nullopt : load_number(value.type, value.data.data());
}

double as_double(const Number& number) {
  return std::visit([](auto value) { return static_cast<double>(value); }, number);
}

std::optional<int64_t> as_int64(const Number& number) {
  if (const auto* value = std::get_if<int64_t>(&number)) {
    return *value;
  }
  const auto* value = std::get_if<uint64_t>(&number);
  if (value == nullptr || *value > uint64_t{std::numeric_limits<int64_t>::max()}) {
    return std::nullopt;
  }
  return static_cast<int64_t>(*value);
}

std::string_view load_string(const std::byte* in) {
  return {reinterpret_cast<const char*>(in) + 8, load<uint64_t>(in)};
}

}  // namespace

int64_t value_bytes(ValueType type) {
  switch (type) {
    case ValueType::kU8:
    case ValueType::kI8:
    case ValueType::kBool:
      return 1;
    case ValueType::kU16:
    case ValueType::kI16:
      return 2;
    case ValueType::kU32:
    case ValueType::kI32:
    case ValueType::kF32:
      return 4;
    case ValueType::kU64:
    case ValueType::kI64:
    case ValueType::kF64:
      return 8;
    case ValueType::kString:
    case ValueType::kArray:
      break;
  }
  return 0;
}

std::string_view value_type_name(ValueType type) {
  constexpr std::string_view kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                         "bool", "string", "array", "u64", "i64", "f64"};
  return kNames[static_cast<uint32_t>(type)];
}

std::string Value::type_name() const {
  const std::string_view name = value_type_name(type);
  return is_array ? fmt::format("an array of {}", name) : fmt::format("a value of type {}", name);
}

bool Metadata::add(std::string_view key, const Value& value) {
  if (!index_.emplace(key, entries_.size()).second) {
    return false;
  }
  entries_.emplace_back(key, value);
  return true;
}

const Value* Metadata::find(std::string_view key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &entries_[found->second].second;
}

Status Metadata::corrupt(std::string_view key, std::string_view what) const {
  return make_error(StatusCode::kCorrupt, "{}: key {}: {}", where_, key, what);
}

Status Metadata::unsupported(std::string_view key, std::string_view what) const {
  return make_error(StatusCode::kUnsupported, "{}: key {}: {}", where_, key, what);
}

Result<const Value*> Metadata::require(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) {
    return make_error(StatusCode::kCorrupt,
                      "{}: metadata has no {}; the file is incomplete: convert the model again "
                      "with a current converter, or download another file of it",
                      where_, key);
  }
  return value;
}

Status Metadata::wrong_type(std::string_view key,
                            std::string_view expected,
                            const Value& value) const {
  return make_error(StatusCode::kCorrupt,
                    "{}: metadata {}: expected {}, got {}; convert the model again with a current "
                    "converter",
                    where_, key, expected, value.type_name());
}

Result<std::string_view> Metadata::require_string(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require(key));
  if (value->is_array || value->type != ValueType::kString) {
    return wrong_type(key, "a string", *value);
  }
  return load_string(value->data.data());
}

Result<uint64_t> Metadata::require_uint(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require(key));
  const auto number = scalar_number(*value);
  if (!number || value->type == ValueType::kBool || std::holds_alternative<double>(*number)) {
    return wrong_type(key, "an integer", *value);
  }
  if (const auto* unsigned_value = std::get_if<uint64_t>(&*number)) {
    return *unsigned_value;
  }
  const int64_t signed_value = std::get<int64_t>(*number);
  if (signed_value < 0) {
    return make_error(StatusCode::kCorrupt,
                      "{}: metadata {} is {}, but must not be negative; convert the model again",
                      where_, key, signed_value);
  }
  return static_cast<uint64_t>(signed_value);
}

Result<double> Metadata::require_float(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require(key));
  const auto number = scalar_number(*value);
  if (!number || value->type == ValueType::kBool) {
    return wrong_type(key, "a number", *value);
  }
  return as_double(*number);
}

Result<bool> Metadata::require_bool(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require(key));
  if (value->is_array || value->type != ValueType::kBool) {
    return wrong_type(key, "a bool", *value);
  }
  return load<uint8_t>(value->data.data()) != 0;
}

Result<std::string_view> Metadata::optional_string(std::string_view key,
                                                   std::string_view fallback) const {
  return find(key) == nullptr ? fallback : require_string(key);
}

Result<uint64_t> Metadata::optional_uint(std::string_view key, uint64_t fallback) const {
  return find(key) == nullptr ? fallback : require_uint(key);
}

Result<int64_t> Metadata::require_count(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const uint64_t value, require_uint(key));
  if (value >= (uint64_t{1} << 31)) {
    return corrupt(key, fmt::format("{} is out of range", value));
  }
  return static_cast<int64_t>(value);
}

Result<int64_t> Metadata::optional_count(std::string_view key, int64_t fallback) const {
  return find(key) == nullptr ? Result<int64_t>(fallback) : require_count(key);
}

Result<double> Metadata::optional_float(std::string_view key, double fallback) const {
  return find(key) == nullptr ? fallback : require_float(key);
}

Result<bool> Metadata::optional_bool(std::string_view key, bool fallback) const {
  return find(key) == nullptr ? fallback : require_bool(key);
}

Result<const Value*> Metadata::require_array(std::string_view key,
                                             std::string_view expected) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require(key));
  const bool strings = value->type == ValueType::kString;
  if (!value->is_array || strings != (expected == "strings")) {
    return wrong_type(key, fmt::format("an array of {}", expected), *value);
  }
  return value;
}

Result<std::vector<std::string_view>> Metadata::require_strings(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require_array(key, "strings"));
  std::vector<std::string_view> strings;
  strings.reserve(static_cast<size_t>(value->count));
  const std::byte* at = value->data.data();
  for (int64_t i = 0; i < value->count; ++i) {
    strings.push_back(load_string(at));
    at += 8 + strings.back().size();
  }
  return strings;
}

Result<std::vector<int64_t>> Metadata::require_ints(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require_array(key, "integers"));
  std::vector<int64_t> numbers(static_cast<size_t>(value->count));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto number = load_number(
        value->type, value->data.data() + i * static_cast<size_t>(value_bytes(value->type)));
    if (std::holds_alternative<double>(*number)) {
      return wrong_type(key, "an array of integers", *value);
    }
    const auto integer = as_int64(*number);
    if (!integer) {
      return make_error(StatusCode::kCorrupt, "{}: metadata {}: element {} is {}, above 2^63 - 1",
                        where_, key, i, std::get<uint64_t>(*number));
    }
    numbers[i] = *integer;
  }
  return numbers;
}

Result<std::vector<float>> Metadata::require_floats(std::string_view key) const {
  NIBBLE_ASSIGN_OR_RETURN(const Value* value, require_array(key, "numbers"));
  std::vector<float> numbers(static_cast<size_t>(value->count));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto number = load_number(
        value->type, value->data.data() + i * static_cast<size_t>(value_bytes(value->type)));
    numbers[i] = static_cast<float>(as_double(*number));
  }
  return numbers;
}

}  // namespace nibble::gguf
