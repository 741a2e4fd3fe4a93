#include "base/json_lines.h"

#include <algorithm>

namespace nibble {
namespace {

Status take_line(std::string_view line, const std::function<Status(const Json&)>& on_line) {
  NIBBLE_ASSIGN_OR_RETURN(const Json json, Json::parse(line));
  if (!json.is_object()) {
    return make_error(StatusCode::kCorrupt, "expected an object, got {}", json_type_name(json));
  }
  return on_line(json);
}

}  // namespace

Status for_each_json_line(const JsonLines& lines,
                          const std::function<Status(const Json&)>& on_line) {
  const std::string_view text = lines.text;
  int64_t number = 0;
  int64_t taken = 0;
  for (size_t at = 0; at < text.size() && (lines.limit == 0 || taken < lines.limit);) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const auto line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) {
      continue;
    }
    const Status status = take_line(line, on_line);
    if (!status.ok()) {
      return status.with_context(fmt::format("{}: line {}", lines.where, number));
    }
    ++taken;
  }
  return {};
}

}  // namespace nibble
