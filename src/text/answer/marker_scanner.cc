#include "text/answer/marker_scanner.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace nibble {

MarkerScanner::MarkerScanner(std::vector<std::string> markers, Sink& sink)
    : markers_(std::move(markers)), sink_(sink) {
  for (const std::string& marker : markers_) {
    CHECK(!marker.empty());
    if (first_bytes_.find(marker.front()) == std::string::npos) {
      first_bytes_ += marker.front();
    }
  }
}

size_t MarkerScanner::find_candidate(size_t from) const {
  for (size_t at = held_.find_first_of(first_bytes_, from); at != std::string::npos;
       at = held_.find_first_of(first_bytes_, at + 1)) {
    const std::string_view rest = std::string_view(held_).substr(at);
    if (std::ranges::any_of(markers_, [rest](std::string_view marker) {
          return rest.starts_with(marker) || marker.starts_with(rest);
        })) {
      return at;
    }
  }
  return held_.size();
}

void MarkerScanner::text(std::string_view text) {
  held_ += text;
  size_t begin = 0;
  while (begin < held_.size()) {
    const size_t at = find_candidate(begin);
    if (at > begin) {
      sink_.on_text(std::string_view(held_).substr(begin, at - begin));
    }
    begin = at;
    const std::string_view rest = std::string_view(held_).substr(at);
    const auto marker = std::ranges::find_if(
        markers_, [rest](std::string_view each) { return rest.starts_with(each); });
    if (marker == markers_.end()) {
      break;
    }
    sink_.on_marker(*marker, Written::kAsText);
    begin += marker->size();
  }
  held_.erase(0, begin);
}

void MarkerScanner::special(std::string_view token) {
  finish();
  if (std::ranges::find(markers_, token) != markers_.end()) {
    sink_.on_marker(token, Written::kAsToken);
  } else {
    sink_.on_token(token);
  }
}

void MarkerScanner::finish() {
  if (!held_.empty()) {
    sink_.on_text(std::exchange(held_, {}));
  }
}

}  // namespace nibble
