#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nibble {

/// A text and what may follow it. The two are joined as they are: a blank between them belongs to
/// the continuation.
struct Choice {
  std::string context;
  std::string continuation;
  int64_t characters = 0;  // of the choice by itself, without a blank in front
  int64_t bytes = 0;
};

/// One question. A single choice asks whether the model would say exactly this.
struct TaskItem {
  std::vector<Choice> choices;
  int64_t gold = 0;  // which is right
};

struct Task {
  std::string name;
  std::vector<TaskItem> items;
};

}  // namespace nibble
