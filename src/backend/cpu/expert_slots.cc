#include "backend/cpu/expert_slots.h"

#include <algorithm>

#include "backend/cpu/kernel_table.h"
#include "base/math.h"

namespace nibble::cpu {

ExpertSlots::ExpertSlots(int64_t max_rows, const PresentExperts& experts, int64_t top_k)
    : first_expert_(experts.first), top_k_(top_k) {
  const int64_t slots = max_rows * top_k;
  capacity_ = slots + (kTileRows - 1) * std::min(experts.count, slots);
  chosen_.resize(static_cast<size_t>(slots));
  weights_.resize(static_cast<size_t>(slots));
  slot_of_.resize(static_cast<size_t>(slots));
  place_.resize(static_cast<size_t>(experts.count));
  next_.resize(static_cast<size_t>(experts.count));
  active_.reserve(static_cast<size_t>(experts.count));
}

void ExpertSlots::sort(int64_t rows) {
  const auto slots = static_cast<size_t>(rows * top_k_);
  std::ranges::fill(next_, 0);
  for (size_t i = 0; i < slots; ++i) {
    const int64_t expert = chosen_[i] - first_expert_;
    const bool present = expert >= 0 && expert < std::ssize(next_);
    chosen_[i] = static_cast<int32_t>(present ? expert : kDropped);
    if (present) {
      ++next_[static_cast<size_t>(expert)];
    }
  }
  active_.clear();
  int64_t first = 0;
  for (size_t expert = 0; expert < next_.size(); ++expert) {
    const int64_t count = next_[expert];
    next_[expert] = first;
    if (count > 0) {
      place_[expert] = active_.size();
      active_.push_back({static_cast<int32_t>(expert), first, count});
      first += round_up(count, kTileRows);
    }
  }
  for (size_t i = 0; i < slots; ++i) {
    slot_of_[i] = chosen_[i] == kDropped ? kDropped : next_[static_cast<size_t>(chosen_[i])]++;
  }
}

}  // namespace nibble::cpu
