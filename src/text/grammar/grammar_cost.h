#pragma once

#include <cstdint>
#include <vector>

#include "text/grammar/ascii_set.h"

namespace nibble {

// What it costs, in time and memory, to prepare parts of a grammar for a vocabulary: which tokens
// may come is found out for each state, and kept. Measured with Qwen2's 151,646 tokens, one core of
// a busy machine: a character of a text takes 7 us and 0.2 KB, a class of any character 20 ms and
// 22 KB, [a-z] 2 ms and 18 KB, [0-9] 5 us and 0.2 KB, a character that a string of JSON must have
// 30 ms and 85 KB, a limit of its length 17 ms and 100 KB.

inline constexpr int64_t kLiteralCost = 4;      // of a byte
inline constexpr int64_t kLeastPartCost = 128;  // of what may be repeated
inline constexpr int64_t kAnyCharacterCost = 1024;
inline constexpr int64_t kStringCharacterCost = 1536;
inline constexpr int64_t kNameNodeCost = 1536;
/// The most that all parts of one request's grammar may cost: 1000 classes of any character.
inline constexpr int64_t kMostGrammarCost = 1000 * kAnyCharacterCost;

/// Of a class: tokens are made of letters for the most part.
[[nodiscard]] int64_t class_cost(const AsciiSet& set);

/// Adds up what an expression costs, as it is read from left to right. Parts that may be empty, one
/// after another, can all be what comes next: with 100 of "a?" preparing takes 2 s, with 20 of ".?"
/// a mask 5 s. So each costs more, the more such parts are in front of it.
class PartCosts final {
 public:
  /// A part; it may not be empty.
  void item(int64_t cost);
  /// It may, after all.
  void may_be_empty();
  /// It comes so many times.
  void repeat(int64_t times);
  void end_alternative();
  void group_begin() { groups_.emplace_back(); }
  /// The group becomes a part of the one around it.
  void group_end();
  [[nodiscard]] int64_t depth() const { return std::ssize(groups_); }
  [[nodiscard]] int64_t total() const { return groups_.back().cost; }
  [[nodiscard]] bool too_much() const { return total() > kMostGrammarCost; }

 private:
  struct Group {
    int64_t cost = 0;
    int64_t required = 0;        // parts of the alternative that may not be empty
    int64_t run_before = 0;      // parts that may be, directly in front of the last one
    int64_t run = 0;             // and with it
    int64_t last = 0;            // cost of the last one
    bool empty_allowed = false;  // by an alternative that is over
  };
  [[nodiscard]] static int64_t weight(int64_t cost);

  std::vector<Group> groups_ = {Group{}};
};

}  // namespace nibble
