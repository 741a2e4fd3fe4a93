#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Calls `on_line` for every JSON object of a JSONL file, one a line; lines of white space are
/// passed over. Failures, those of `on_line` too, name the file and the line, counted from 1.
///   limit: most lines; 0: all
Status for_each_json_line(const std::string& path,
                          int64_t limit,
                          const std::function<Status(const Json&)>& on_line);

}  // namespace nibble
