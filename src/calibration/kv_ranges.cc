#include "calibration/kv_ranges.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "quant/hadamard.h"

namespace nibble {
namespace {

// Of a channel's range. Text that is not the calibration's goes beyond the whole of it now and
// then; what is cut off makes all other codes finer.
constexpr float kParts[] = {1.0F, 0.85F, 0.7F, 0.55F};
constexpr float kHalfCodes = 7.5F;

}  // namespace

KvRanges::KvRanges(int64_t heads, int64_t head_dim)
    : head_dim_(head_dim), turned_(static_cast<size_t>(head_dim)) {
  for (Extremes& extremes : extremes_) {
    extremes.low.assign(static_cast<size_t>(heads * head_dim), std::numeric_limits<float>::max());
    extremes.high.assign(static_cast<size_t>(heads * head_dim),
                         std::numeric_limits<float>::lowest());
  }
}

void KvRanges::add(int64_t head, std::span<const float> x) {
  std::ranges::copy(x, turned_.begin());
  hadamard(turned_.data(), head_dim_);
  for (const bool turned : {false, true}) {
    const float* values = turned ? turned_.data() : x.data();
    Extremes& extremes = extremes_[turned ? 1 : 0];
    for (int64_t d = 0; d < head_dim_; ++d) {
      const auto at = static_cast<size_t>(head * head_dim_ + d);
      extremes.low[at] = std::min(extremes.low[at], values[d]);
      extremes.high[at] = std::max(extremes.high[at], values[d]);
    }
  }
}

KvSidecar::Ranges KvRanges::ranges_of(bool turned, float part, About about) const {
  const auto& [low, high] = extremes_[turned ? 1 : 0];
  KvSidecar::Ranges out{.turned = turned};
  for (size_t i = 0; i < low.size(); ++i) {
    const float half = about == About::kZero ? std::max(std::fabs(low[i]), std::fabs(high[i]))
                                             : 0.5F * high[i] - 0.5F * low[i];
    const float step = part * half / kHalfCodes;
    out.step.push_back(step);
    if (about == About::kMiddle) {  // what code 8 stands for, where 7.5 is the middle
      out.mean.push_back(0.5F * high[i] + 0.5F * low[i] + 0.5F * step);
    }
  }
  for (int64_t at = 0; turned && at < std::ssize(out.mean); at += head_dim_) {
    inverse_hadamard(out.mean.data() + at, head_dim_);
  }
  return out;
}

std::vector<KvSidecar::Ranges> KvRanges::candidates(About about) const {
  std::vector<KvSidecar::Ranges> out;
  for (const bool turned : {false, true}) {
    for (const float part : kParts) {
      out.push_back(ranges_of(turned, part, about));
    }
  }
  return out;
}

}  // namespace nibble
