#include "net/sse_parser.h"

#include <algorithm>
#include <utility>

namespace nibble {

Status SseParser::push(std::string_view bytes) {
  while (!bytes.empty()) {
    if (std::exchange(after_cr_, false) && bytes.front() == '\n') {
      bytes.remove_prefix(1);
      continue;
    }
    const size_t end = bytes.find_first_of("\r\n");
    if (line_.size() + data_.size() + std::min(end, bytes.size()) > limit_) {
      return make_error(StatusCode::kCorrupt, "an event of the server is longer than {} bytes",
                        limit_);
    }
    if (end == std::string_view::npos) {
      line_ += bytes;
      return {};
    }
    after_cr_ = bytes[end] == '\r';
    if (line_.empty()) {
      take_line(bytes.substr(0, end));
    } else {
      line_ += bytes.substr(0, end);
      take_line(line_);
      line_.clear();
    }
    bytes.remove_prefix(end + 1);
  }
  return {};
}

void SseParser::finish() {
  if (!line_.empty()) {
    take_line(std::exchange(line_, ""));
  }
  dispatch();
}

void SseParser::take_line(std::string_view line) {
  if (std::exchange(first_line_, false) && line.starts_with("\xEF\xBB\xBF")) {
    line.remove_prefix(3);
  }
  if (line.empty()) {
    dispatch();
    return;
  }
  const size_t colon = line.find(':');
  const std::string_view field = line.substr(0, colon);
  std::string_view value = colon == std::string_view::npos ? "" : line.substr(colon + 1);
  if (value.starts_with(' ')) {
    value.remove_prefix(1);
  }
  if (field == "data") {
    if (std::exchange(has_data_, true)) {
      data_ += '\n';
    }
    data_ += value;
  } else if (field == "event") {
    name_ = value;
  }
}

void SseParser::dispatch() {
  if (std::exchange(has_data_, false)) {
    sink_({.name = name_, .data = data_});
  }
  name_.clear();
  data_.clear();
}

}  // namespace nibble
