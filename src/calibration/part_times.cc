#include "calibration/part_times.h"

#include <string_view>

#include "base/log.h"

namespace nibble {
namespace {

constexpr std::array<std::string_view, kCalibrationParts> kNames = {
    "forward", "sums", "states", "load", "factor", "scales", "rounding", "encode"};

}  // namespace

void PartTimes::finish_layer(int64_t layer) {
  const Clock::time_point now = Clock::now();
  const double whole = std::chrono::duration<double>(now - begin_).count();
  std::string text;
  for (size_t i = 0; i < kNames.size(); ++i) {
    text += fmt::format("{}{} {:.2f}", i == 0 ? "" : ", ", kNames.at(i), layer_.at(i));
    all_.at(i) += layer_.at(i);
  }
  NIBBLE_LOG(kInfo, "calibration: layer {} in {:.2f} s: {}", layer, whole, text);
  layer_ = {};
  begin_ = now;
  total_ += whole;
  ++layers_;
}

Json PartTimes::json() const {
  Json parts = Json::object({{"layers", layers_}, {"total", total_}});
  for (size_t i = 0; i < kNames.size(); ++i) {
    parts.set(std::string(kNames.at(i)), all_.at(i));
  }
  return parts;
}

}  // namespace nibble
