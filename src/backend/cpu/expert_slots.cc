#include "backend/cpu/expert_slots.h"

#include <algorithm>

#include "backend/cpu/kernel_table.h"
#include "base/math.h"

namespace nibble::cpu {

ExpertSlots::ExpertSlots(int64_t max_rows, int64_t experts, int64_t top_k) : top_k_(top_k) {
  const int64_t slots = max_rows * top_k;
  capacity_ = slots + (kTileRows - 1) * std::min(experts, slots);
  chosen_.resize(static_cast<size_t>(slots));
  weights_.resize(static_cast<size_t>(slots));
  slot_of_.resize(static_cast<size_t>(slots));
  place_.resize(static_cast<size_t>(experts));
  next_.resize(static_cast<size_t>(experts));
  active_.reserve(static_cast<size_t>(experts));
}

void ExpertSlots::sort(int64_t rows) {
  const auto slots = static_cast<size_t>(rows * top_k_);
  std::ranges::fill(next_, 0);
  for (size_t i = 0; i < slots; ++i) {
    ++next_[static_cast<size_t>(chosen_[i])];
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
    int64_t& next = next_[static_cast<size_t>(chosen_[i])];
    slot_of_[i] = next++;
  }
}

}  // namespace nibble::cpu
