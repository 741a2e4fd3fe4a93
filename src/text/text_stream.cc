#include "text/text_stream.h"

#include <algorithm>
#include <utility>

namespace nibble {
namespace {

// Length of the longest proper prefix of `stop` that ends `text`.
size_t partial_match(std::string_view text, std::string_view stop) {
  size_t length = std::min(text.size(), stop.size() - 1);
  while (!text.ends_with(stop.substr(0, length))) {
    --length;
  }
  return length;
}

}  // namespace

StopFilter::StopFilter(std::vector<std::string> stops, StopText mode)
    : stops_(std::move(stops)), mode_(mode) {
  std::erase(stops_, "");
}

std::string StopFilter::push(std::string_view text) {
  if (stopped_) {
    return "";
  }
  held_ += text;
  size_t end = std::string::npos;
  const std::string* first = nullptr;
  for (const std::string& stop : stops_) {
    const size_t begin = held_.find(stop);
    if (begin == std::string::npos) {
      continue;
    }
    const size_t stop_end = begin + stop.size();
    if (first == nullptr || stop_end < end || (stop_end == end && stop.size() > first->size())) {
      end = stop_end;
      first = &stop;
    }
  }
  if (first != nullptr) {
    stopped_ = true;
    found_ = *first;
    held_.resize(mode_ == StopText::kKeep ? end : end - first->size());
    return std::exchange(held_, "");
  }
  size_t keep = 0;
  for (const std::string& stop : stops_) {
    keep = std::max(keep, partial_match(held_, stop));
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopFilter::finish() { return std::exchange(held_, ""); }

}  // namespace nibble
