#include "text/grammar/grammar_cost.h"

#include <algorithm>
#include <utility>

namespace nibble {

int64_t class_cost(const AsciiSet& set) {
  constexpr int64_t kLetterCost = 16;
  constexpr size_t kNearlyAll = 90;
  int64_t letters = 0;
  for (size_t c = 'A'; c <= 'z'; ++c) {
    letters += (c <= 'Z' || c >= 'a') && set.test(c) ? 1 : 0;
  }
  return set.count() > kNearlyAll ? kAnyCharacterCost : kLeastPartCost + kLetterCost * letters;
}

int64_t PartCosts::weight(int64_t cost) {
  const int64_t bounded = std::min(cost, kAnyCharacterCost);
  return bounded * bounded / 64;
}

void PartCosts::item(int64_t cost) {
  Group& group = groups_.back();
  group.cost += cost;
  group.last = cost;
  ++group.required;
  group.run_before = std::exchange(group.run, 0);
}

void PartCosts::may_be_empty() {
  Group& group = groups_.back();
  if (group.run == 0 && group.required > 0) {
    group.cost += group.run_before * weight(group.last);
    group.run = group.run_before + 1;
    --group.required;
  }
}

void PartCosts::repeat(int64_t times) {
  Group& group = groups_.back();
  group.cost += group.last * (times - 1);
  if (group.run > 0) {
    group.cost += times * times / 2 * weight(group.last);
  }
}

void PartCosts::end_alternative() {
  Group& group = groups_.back();
  group.empty_allowed = group.empty_allowed || group.required == 0;
  group.required = group.run = group.run_before = 0;
}

void PartCosts::group_end() {
  end_alternative();
  const Group group = groups_.back();
  groups_.pop_back();
  item(group.cost + 1);
  if (group.empty_allowed) {
    may_be_empty();
  }
}

}  // namespace nibble
