#include <cmath>

#include <fmt/format.h>

#include "text/grammar/schema_writer.h"

namespace nibble {
namespace {

constexpr int64_t kMostCount = 65536;
constexpr size_t kShownBytes = 200;  // of a pointer, which may hold anything

}  // namespace

std::string shown_pointer(const std::string& pointer, std::string_view more) {
  return pointer.size() > kShownBytes ? pointer
                                      : pointer + std::string(more.substr(0, kShownBytes + 1));
}

SchemaPlace SchemaPlace::member(std::string_view key) const {
  return {schema->find(key), shown_pointer(pointer, fmt::format("/{}", key))};
}

SchemaPlace SchemaPlace::item(std::string_view key, size_t index) const {
  return {&schema->find(key)->as_array()[index],
          shown_pointer(pointer, fmt::format("/{}/{}", key, index))};
}

SchemaPlace SchemaPlace::entry(std::string_view key, std::string_view name) const {
  std::string escaped;
  for (const char c : name.substr(0, kShownBytes + 1)) {
    if (c == '~' || c == '/') {
      escaped += c == '~' ? "~0" : "~1";
    } else {
      escaped += c;
    }
  }
  return {schema->find(key)->find(name),
          shown_pointer(pointer, fmt::format("/{}/{}", key, escaped))};
}

Status schema_error(std::string_view pointer, std::string_view message) {
  return make_error(StatusCode::kInvalidArgument, "{}{}: {}", pointer.substr(0, kShownBytes),
                    pointer.size() > kShownBytes ? "..." : "", message);
}

Result<std::optional<int64_t>> schema_count(const SchemaPlace& place, std::string_view key) {
  const Json* value = place.find(key);
  if (value == nullptr) {
    return std::optional<int64_t>();
  }
  const bool whole = value->is_int() ||
                     (value->is_double() && std::trunc(value->as_double()) == value->as_double());
  if (!whole || value->as_double() < 0 || value->as_double() > kMostCount) {
    return schema_error(place.pointer + "/" + std::string(key),
                        fmt::format("expected an integer from 0 to {}", kMostCount));
  }
  return std::optional(static_cast<int64_t>(value->as_double()));
}

}  // namespace nibble
