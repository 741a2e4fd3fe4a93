#include "eval/task_result.h"

#include "base/check.h"

namespace nibble {
namespace {

// Whether the right choice has the largest log-likelihood for its length.
template <typename Length>
double right(const TaskItem& item, std::span<const ChoiceScore> scores, const Length& length) {
  if (scores.size() == 1) {
    return scores[0].greedy ? 1 : 0;
  }
  size_t best = 0;
  const auto value = [&](size_t choice) {
    return scores[choice].log_likelihood / length(item.choices[choice]);
  };
  for (size_t choice = 1; choice < scores.size(); ++choice) {
    best = value(choice) > value(best) ? choice : best;
  }
  return static_cast<int64_t>(best) == item.gold ? 1 : 0;
}

}  // namespace

TaskAnswers answers_of(const Task& task, std::span<const std::vector<ChoiceScore>> scores) {
  CHECK_EQ(task.items.size(), scores.size());
  TaskAnswers out;
  for (size_t i = 0; i < scores.size(); ++i) {
    const TaskItem& item = task.items[i];
    out.acc.push_back(right(item, scores[i], [](const Choice&) { return 1.0; }));
    out.acc_norm.push_back(right(
        item, scores[i], [](const Choice& one) { return static_cast<double>(one.characters); }));
    out.acc_bytes.push_back(
        right(item, scores[i], [](const Choice& one) { return static_cast<double>(one.bytes); }));
    out.nll.push_back(-scores[i][static_cast<size_t>(item.gold)].log_likelihood);
  }
  return out;
}

}  // namespace nibble
