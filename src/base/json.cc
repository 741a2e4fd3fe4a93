#include "base/json.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "base/utf8.h"

namespace nibble {
namespace {

constexpr size_t kIndexFrom = 16;  // below this, a linear search is as fast as hashing

void append_indent(std::string& out, int width) {
  out.push_back('\n');
  out.append(static_cast<size_t>(width), ' ');
}

void append_number(std::string& out, double value) {
  CHECK_MSG(std::isfinite(value), "JSON has no {}", value);
  out += format_double(value);
}

// indent < 0 means compact.
void append_value(std::string& out, const Json& value, int indent, int depth);

void append_array(std::string& out, const JsonArray& array, int indent, int depth) {
  out.push_back('[');
  for (size_t i = 0; i < array.size(); ++i) {
    if (i != 0) {
      out.push_back(',');
    }
    if (indent >= 0) {
      append_indent(out, indent * (depth + 1));
    }
    append_value(out, array[i], indent, depth + 1);
  }
  if (indent >= 0 && !array.empty()) {
    append_indent(out, indent * depth);
  }
  out.push_back(']');
}

void append_object(std::string& out, const JsonObject& object, int indent, int depth) {
  out.push_back('{');
  bool first = true;
  for (const auto& [key, member] : object) {
    if (!first) {
      out.push_back(',');
    }
    first = false;
    if (indent >= 0) {
      append_indent(out, indent * (depth + 1));
    }
    append_json_string(out, key);
    out += indent >= 0 ? ": " : ":";
    append_value(out, member, indent, depth + 1);
  }
  if (indent >= 0 && !object.empty()) {
    append_indent(out, indent * depth);
  }
  out.push_back('}');
}

void append_value(std::string& out, const Json& value, int indent, int depth) {
  switch (value.type()) {
    case Json::Type::kNull:
      out += "null";
      break;
    case Json::Type::kBool:
      out += value.as_bool() ? "true" : "false";
      break;
    case Json::Type::kInt:
      out += std::to_string(value.as_int());
      break;
    case Json::Type::kUint:
      out += std::to_string(value.as_uint());
      break;
    case Json::Type::kDouble:
      append_number(out, value.as_double());
      break;
    case Json::Type::kString:
      append_json_string(out, value.as_string());
      break;
    case Json::Type::kArray:
      append_array(out, value.as_array(), indent, depth);
      break;
    case Json::Type::kObject:
      append_object(out, value.as_object(), indent, depth);
      break;
  }
}

}  // namespace

std::string_view json_type_name(const Json& value) {
  switch (value.type()) {
    case Json::Type::kNull:
      return "null";
    case Json::Type::kBool:
      return "a boolean";
    case Json::Type::kInt:
    case Json::Type::kUint:
      return "an integer";
    case Json::Type::kDouble:
      return "a number";
    case Json::Type::kString:
      return "a string";
    case Json::Type::kArray:
      return "an array";
    case Json::Type::kObject:
      return "an object";
  }
  return "nothing";
}

size_t JsonObject::index_of(std::string_view key) const {
  if (members_.size() < kIndexFrom) {
    for (size_t i = 0; i < members_.size(); ++i) {
      if (members_[i].first == key) {
        return i;
      }
    }
    return members_.size();
  }
  if (index_.size() != members_.size()) {
    index_.clear();
    index_.reserve(members_.size());
    for (size_t i = 0; i < members_.size(); ++i) {
      index_.emplace(members_[i].first, i);
    }
  }
  const auto found = index_.find(key);
  return found == index_.end() ? members_.size() : found->second;
}

const Json* JsonObject::find(std::string_view key) const {
  const size_t i = index_of(key);
  return i < members_.size() ? &members_[i].second : nullptr;
}

Json* JsonObject::find(std::string_view key) {
  const size_t i = index_of(key);
  return i < members_.size() ? &members_[i].second : nullptr;
}

Json& JsonObject::set(std::string key, Json value) {
  if (Json* member = find(key)) {
    *member = std::move(value);
    return *member;
  }
  append(std::move(key), std::move(value));
  return members_.back().second;
}

bool JsonObject::erase(std::string_view key) {
  const size_t i = index_of(key);
  if (i == members_.size()) {
    return false;
  }
  index_.clear();
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(i));
  return true;
}

void JsonObject::append(std::string key, Json value) {
  index_.clear();
  members_.emplace_back(std::move(key), std::move(value));
}

JsonObject::JsonObject(const JsonObject& other) : members_(other.members_) {}
JsonObject& JsonObject::operator=(const JsonObject& other) {
  if (this != &other) {
    index_.clear();
    members_ = other.members_;
  }
  return *this;
}

std::vector<JsonObject::Member>::const_iterator JsonObject::begin() const {
  return members_.begin();
}
std::vector<JsonObject::Member>::const_iterator JsonObject::end() const { return members_.end(); }

Json::Json(uint64_t value) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    value_ = static_cast<int64_t>(value);
  } else {
    value_ = value;
  }
}

// The members are moved out of, one binding at a time.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
Json Json::object(std::vector<JsonObject::Member> members) {
  JsonObject result;
  for (auto& [key, value] : members) {
    result.set(std::move(key), std::move(value));
  }
  return Json(std::move(result));
}

bool Json::as_bool() const {
  CHECK(is_bool());
  return std::get<bool>(value_);
}
int64_t Json::as_int() const {
  CHECK(is_int());
  return std::get<int64_t>(value_);
}
uint64_t Json::as_uint() const {
  if (is_int()) {
    CHECK_GE(as_int(), 0);
    return static_cast<uint64_t>(as_int());
  }
  CHECK(type() == Type::kUint);
  return std::get<uint64_t>(value_);
}
double Json::as_double() const {
  CHECK(is_number());
  if (is_int()) {
    return static_cast<double>(std::get<int64_t>(value_));
  }
  return is_double() ? std::get<double>(value_) : static_cast<double>(std::get<uint64_t>(value_));
}
const std::string& Json::as_string() const {
  CHECK(is_string());
  return std::get<std::string>(value_);
}
const JsonArray& Json::as_array() const {
  CHECK(is_array());
  return std::get<JsonArray>(value_);
}
JsonArray& Json::as_array() {
  CHECK(is_array());
  return std::get<JsonArray>(value_);
}
const JsonObject& Json::as_object() const {
  CHECK(is_object());
  return std::get<JsonObject>(value_);
}
JsonObject& Json::as_object() {
  CHECK(is_object());
  return std::get<JsonObject>(value_);
}

const Json* Json::find(std::string_view key) const {
  return is_object() ? std::get<JsonObject>(value_).find(key) : nullptr;
}

Json& Json::set(std::string key, Json value) {
  if (is_null()) {
    value_ = JsonObject();
  }
  return as_object().set(std::move(key), std::move(value));
}

std::string Json::dump() const {
  std::string out;
  append_value(out, *this, -1, 0);
  return out;
}

std::string Json::dump_pretty(int indent) const {
  std::string out;
  append_value(out, *this, indent, 0);
  out.push_back('\n');
  return out;
}

void append_json_string(std::string& out, std::string_view text) {
  out.push_back('"');
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    const size_t length = utf8_length(text, i);
    if (length == 0) {
      out += "\xef\xbf\xbd";
      ++i;
      continue;
    }
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out.append(text.substr(i, length));
        }
    }
    i += length;
  }
  out.push_back('"');
}

std::string format_double(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  if (std::isinf(value)) {
    return value > 0 ? "inf" : "-inf";
  }
  // Shortest digits that round-trip; exponent form only outside [1e-4, 1e16), as Python prints.
  const double magnitude = std::fabs(value);
  const bool fixed = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  char buffer[400];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value,
                                 fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, end.ptr);
  if (fixed && text.find('.') == std::string::npos) {
    text += ".0";
  }
  return text;
}

const Json* JsonReader::find_non_null(std::string_view key) const {
  const Json* member = value_.find(key);
  return member == nullptr || member->is_null() ? nullptr : member;
}

Status JsonReader::wrong_type(std::string_view key, std::string_view expected) const {
  const Json* member = find_non_null(key);
  if (member == nullptr) {
    return make_error(StatusCode::kCorrupt, "{}: field \"{}\" is missing; expected {}", where_, key,
                      expected);
  }
  const bool large = member->type() == Json::Type::kUint;  // no int64
  return make_error(
      StatusCode::kCorrupt, "{}: field \"{}\": expected {}, got {}", where_, key, expected,
      large ? member->dump() + ", which is too large" : std::string(json_type_name(*member)));
}

Result<int64_t> JsonReader::required_int(std::string_view key) const {
  const Json* member = find_non_null(key);
  if (member == nullptr || !member->is_int()) {
    return wrong_type(key, "an integer");
  }
  return member->as_int();
}

Result<double> JsonReader::required_double(std::string_view key) const {
  const Json* member = find_non_null(key);
  if (member == nullptr || !member->is_number()) {
    return wrong_type(key, "a number");
  }
  return member->as_double();
}

Result<std::string> JsonReader::required_string(std::string_view key) const {
  const Json* member = find_non_null(key);
  if (member == nullptr || !member->is_string()) {
    return wrong_type(key, "a string");
  }
  return member->as_string();
}

Result<int64_t> JsonReader::optional_int(std::string_view key, int64_t fallback) const {
  return find_non_null(key) == nullptr ? Result<int64_t>(fallback) : required_int(key);
}

Result<double> JsonReader::optional_double(std::string_view key, double fallback) const {
  return find_non_null(key) == nullptr ? Result<double>(fallback) : required_double(key);
}

Result<std::string> JsonReader::optional_string(std::string_view key, std::string fallback) const {
  return find_non_null(key) == nullptr ? Result<std::string>(std::move(fallback))
                                       : required_string(key);
}

Result<bool> JsonReader::optional_bool(std::string_view key, bool fallback) const {
  const Json* member = find_non_null(key);
  if (member == nullptr) {
    return fallback;
  }
  if (!member->is_bool()) {
    return wrong_type(key, "true or false");
  }
  return member->as_bool();
}

}  // namespace nibble
