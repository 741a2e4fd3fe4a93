#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eval/choice_scoring.h"
#include "eval/statistics.h"
#include "eval/task_item.h"

namespace nibble {

/// Which items a model got right, by 1 and 0, in three ways to choose.
struct TaskAnswers {
  std::vector<double> acc;        // largest log-likelihood
  std::vector<double> acc_norm;   // per character of the choice, as lm-eval's acc_norm
  std::vector<double> acc_bytes;  // per byte, as lm-eval's acc_bytes
  std::vector<double> nll;        // of the right choice, nats
};

/// The first of equal choices counts. An item of one choice is right where greedy decoding gives
/// it.
[[nodiscard]] TaskAnswers answers_of(const Task& task,
                                     std::span<const std::vector<ChoiceScore>> scores);

}  // namespace nibble
