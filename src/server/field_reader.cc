#include "server/field_reader.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

namespace nibble {
namespace {

bool truthy(const Json& value) {
  switch (value.type()) {
    case Json::Type::kNull:
      return false;
    case Json::Type::kBool:
      return value.as_bool();
    case Json::Type::kArray:
      return !value.as_array().empty();
    default:
      return true;
  }
}

}  // namespace

const Json* FieldReader::find(std::string_view key) const {
  const Json* value = object_.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

void FieldReader::fail(std::string_view key, std::string message) {
  if (!error_) {
    error_ = ApiError{400, std::move(message), std::string(key), ""};
  }
}

void FieldReader::wrong_type(std::string_view key, std::string_view expected, const Json& got) {
  fail(key, fmt::format("{}: expected {}, got {}", key, expected, json_type_name(got)));
}

void FieldReader::refuse(std::string_view key, std::string_view reason) {
  const Json* value = find(key);
  if (value != nullptr && truthy(*value)) {
    fail(key, fmt::format("{} is not supported: {}", key, reason));
  }
}

void FieldReader::text(std::string_view key, std::string& target) {
  if (const Json* value = find(key)) {
    value->is_string() ? void(target = value->as_string()) : wrong_type(key, "a string", *value);
  }
}

void FieldReader::boolean(std::string_view key, bool& target) {
  if (const Json* value = find(key)) {
    value->is_bool() ? void(target = value->as_bool()) : wrong_type(key, "a boolean", *value);
  }
}

void FieldReader::integer(std::string_view key, int64_t low, int64_t high, int64_t& target) {
  const Json* value = find(key);
  if (value == nullptr) {
    return;
  }
  if (!value->is_int()) {
    wrong_type(key, "an integer", *value);
  } else if (value->as_int() < low || value->as_int() > high) {
    fail(key, low == high ? fmt::format("{}: must be {}, got {}", key, low, value->as_int())
                          : fmt::format("{}: must be from {} to {}, got {}", key, low, high,
                                        value->as_int()));
  } else {
    target = value->as_int();
  }
}

void FieldReader::number(std::string_view key, double low, double high, double& target) {
  const Json* value = find(key);
  if (value == nullptr) {
    return;
  }
  if (!value->is_number()) {
    wrong_type(key, "a number", *value);
  } else if (!(value->as_double() >= low && value->as_double() <= high)) {
    fail(key, fmt::format("{}: must be from {} to {}, got {}", key, low, high, value->as_double()));
  } else {
    target = value->as_double();
  }
}

bool FieldReader::texts(std::string_view key, std::vector<std::string>& target) const {
  const Json* value = find(key);
  if (value == nullptr) {
    return true;
  }
  if (!value->is_array() ||
      !std::ranges::all_of(value->as_array(), [](const Json& item) { return item.is_string(); })) {
    return false;
  }
  for (const Json& item : value->as_array()) {
    target.push_back(item.as_string());
  }
  return true;
}

void FieldReader::token_ids(std::string_view key, std::vector<int32_t>& target) {
  const Json* value = find(key);
  if (value == nullptr) {
    return;
  }
  if (!value->is_array()) {
    wrong_type(key, "an array of token ids", *value);
    return;
  }
  for (const Json& id : value->as_array()) {
    if (!id.is_int() || id.as_int() < 0 || id.as_int() > std::numeric_limits<int32_t>::max()) {
      fail(key, fmt::format("{}: {} is not a token id", key, shown(id.dump())));
      return;
    }
    target.push_back(static_cast<int32_t>(id.as_int()));
  }
}

}  // namespace nibble
