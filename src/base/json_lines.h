#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Text of JSON objects, one a line.
struct JsonLines {
  std::string_view text;
  std::string_view where;  // for messages
  int64_t limit = 0;       // most objects; 0: all
};

/// Calls `on_line` for every object; lines of white space are passed over. Failures, those of
/// `on_line` too, say where and name the line, counted from 1.
Status for_each_json_line(const JsonLines& lines,
                          const std::function<Status(const Json&)>& on_line);

}  // namespace nibble
