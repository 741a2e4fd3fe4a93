#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace nibble {

class Json;
using JsonArray = std::vector<Json>;

/// Members in file order with hashed lookup (built on first lookup of a large object).
/// A duplicate key is a parse error, so a key names at most one member.
class JsonObject final {
 public:
  using Member = std::pair<std::string, Json>;

  JsonObject() = default;
  JsonObject(const JsonObject& other);
  JsonObject(JsonObject&& other) noexcept = default;
  JsonObject& operator=(const JsonObject& other);
  JsonObject& operator=(JsonObject&& other) noexcept = default;
  ~JsonObject() = default;

  [[nodiscard]] const Json* find(std::string_view key) const;
  [[nodiscard]] Json* find(std::string_view key);
  /// Replaces the member's value or appends a member.
  Json& set(std::string key, Json value);
  /// Removes a member, keeping the order of the rest; false if there is none.
  bool erase(std::string_view key);
  /// Appends without looking for an equal key; the caller knows that it is new.
  void append(std::string key, Json value);

  // Defined below: clang needs Json complete for them.
  [[nodiscard]] size_t size() const;
  [[nodiscard]] bool empty() const;
  [[nodiscard]] std::vector<Member>::const_iterator begin() const;
  [[nodiscard]] std::vector<Member>::const_iterator end() const;

 private:
  [[nodiscard]] size_t index_of(std::string_view key) const;

  std::vector<Member> members_;
  // Views into members_; empty until needed, dropped on every change. Built by const lookups, so
  // the first lookup of an object must not race with another.
  mutable std::unordered_map<std::string_view, size_t> index_;
};

/// A JSON value. Integers keep all 64 bits; numbers written with a point or exponent are doubles.
class Json final {
 public:
  enum class Type { kNull, kBool, kInt, kUint, kDouble, kString, kArray, kObject };

  Json() = default;
  // NOLINTBEGIN(google-explicit-constructor): a literal is a value
  Json(std::nullptr_t) {}
  Json(bool value) : value_(value) {}
  Json(int value) : value_(static_cast<int64_t>(value)) {}
  Json(int64_t value) : value_(value) {}
  Json(uint64_t value);
  Json(double value) : value_(value) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(std::string_view value) : value_(std::string(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(JsonArray value) : value_(std::move(value)) {}
  Json(JsonObject value) : value_(std::move(value)) {}
  // NOLINTEND(google-explicit-constructor)

  /// Parses one UTF-8 document. Refuses trailing text, duplicate keys, non-finite numbers, a BOM,
  /// invalid UTF-8 and nesting deeper than 256. Errors: kCorrupt with byte offset.
  static Result<Json> parse(std::string_view text);
  /// {{"a", 1}, {"b", "x"}}: an object from members in order.
  static Json object(std::vector<JsonObject::Member> members);

  [[nodiscard]] Type type() const { return static_cast<Type>(value_.index()); }
  [[nodiscard]] bool is_null() const { return type() == Type::kNull; }
  [[nodiscard]] bool is_bool() const { return type() == Type::kBool; }
  /// True for integers that fit int64; values above are kUint.
  [[nodiscard]] bool is_int() const { return type() == Type::kInt; }
  [[nodiscard]] bool is_double() const { return type() == Type::kDouble; }
  [[nodiscard]] bool is_number() const { return is_int() || is_double() || type() == Type::kUint; }
  [[nodiscard]] bool is_string() const { return type() == Type::kString; }
  [[nodiscard]] bool is_array() const { return type() == Type::kArray; }
  [[nodiscard]] bool is_object() const { return type() == Type::kObject; }

  /// The value as the given type; a CHECK fails on another type (test first).
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] int64_t as_int() const;
  [[nodiscard]] uint64_t as_uint() const;  // an integer that is not negative
  [[nodiscard]] double as_double() const;  // any number
  [[nodiscard]] const std::string& as_string() const;
  [[nodiscard]] const JsonArray& as_array() const;
  [[nodiscard]] JsonArray& as_array();
  [[nodiscard]] const JsonObject& as_object() const;
  [[nodiscard]] JsonObject& as_object();

  /// Member of an object; nullptr if this is no object or has no such member.
  [[nodiscard]] const Json* find(std::string_view key) const;
  /// Sets a member of an object (a null value becomes an empty object first).
  Json& set(std::string key, Json value);

  /// Compact text: no blanks, shortest numbers that round-trip ("0.7", "100.0"), UTF-8 kept.
  [[nodiscard]] std::string dump() const;
  /// Indented text for files that people read.
  [[nodiscard]] std::string dump_pretty(int indent = 2) const;

 private:
  // The order of alternatives is the order of Type.
  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, JsonArray, JsonObject>
      value_;
};

inline size_t JsonObject::size() const { return members_.size(); }
inline bool JsonObject::empty() const { return members_.empty(); }

/// Appends `text` as a quoted JSON string; invalid UTF-8 becomes U+FFFD.
void append_json_string(std::string& out, std::string_view text);
/// Shortest text that reads back as `value`, always with a point or exponent ("1.0", "1e+22"):
/// the form of Python's repr.
[[nodiscard]] std::string format_double(double value);
/// "a string", "an array": for messages.
[[nodiscard]] std::string_view json_type_name(const Json& value);

/// Typed access to required and optional members, with errors that name the path ("config.json:
/// field hidden_size: expected an integer, got a string").
class JsonReader final {
 public:
  JsonReader(const Json& value, std::string where) : value_(value), where_(std::move(where)) {}

  [[nodiscard]] Result<int64_t> required_int(std::string_view key) const;
  [[nodiscard]] Result<double> required_double(std::string_view key) const;
  [[nodiscard]] Result<std::string> required_string(std::string_view key) const;
  /// Absent or null gives the default; another type is an error.
  [[nodiscard]] Result<int64_t> optional_int(std::string_view key, int64_t fallback) const;
  [[nodiscard]] Result<double> optional_double(std::string_view key, double fallback) const;
  [[nodiscard]] Result<bool> optional_bool(std::string_view key, bool fallback) const;
  [[nodiscard]] Result<std::string> optional_string(std::string_view key,
                                                    std::string fallback) const;
  [[nodiscard]] const std::string& where() const { return where_; }

 private:
  [[nodiscard]] const Json* find_non_null(std::string_view key) const;
  [[nodiscard]] Status wrong_type(std::string_view key, std::string_view expected) const;

  const Json& value_;
  std::string where_;
};

}  // namespace nibble
