#include "eval/choice_scoring.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/task_result.h"

namespace nibble {
namespace {

using ::testing::ElementsAre;

constexpr size_t kVocab = 11;

std::vector<float> logits_after(std::span<const int32_t> tokens) {
  std::seed_seq seed(tokens.begin(), tokens.end());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kVocab);
  std::ranges::generate(logits, [&] { return normal(random); });
  return logits;
}

/// Logits depend on all tokens of the sequence, which the model remembers by its pages. Counts what
/// it is fed.
class Remembering final : public Model {
 public:
  Remembering() {
    config_.vocab_size = kVocab;
    config_.max_position = 200;
  }
  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string_view scheme() const override { return "fake"; }
  [[nodiscard]] int64_t weight_bytes() const override { return 0; }
  void forward(const StepInput& batch, PagedKvCache& /*cache*/, std::span<float> out) override {
    std::map<int32_t, std::vector<float>> by_row;
    for (const SequenceSpan& span : batch.sequences) {
      std::vector<int32_t>& seen = memory_[span.pages];
      ASSERT_GE(std::ssize(seen), span.kv_len - span.q_len);
      seen.resize(static_cast<size_t>(span.kv_len - span.q_len));
      for (int32_t row = span.q_begin; row < span.q_begin + span.q_len; ++row) {
        seen.push_back(batch.tokens[static_cast<size_t>(row)]);
        by_row[row] = logits_after(seen);
      }
    }
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      std::ranges::copy(by_row.at(batch.logit_rows[i]),
                        out.begin() + static_cast<std::ptrdiff_t>(i * kVocab));
    }
    fed += std::ssize(batch.tokens);
  }

  int64_t fed = 0;

 private:
  ModelConfig config_;
  std::map<const int32_t*, std::vector<int32_t>> memory_;
};

ChoiceScore expected_score(const ChoiceTokens& choice) {
  ChoiceScore out;
  for (auto i = static_cast<size_t>(choice.first_scored); i < choice.tokens.size(); ++i) {
    const auto logits = logits_after(std::span(choice.tokens).first(i));
    double sum = 0;
    for (const float logit : logits) {
      sum += std::exp(static_cast<double>(logit));
    }
    const float own = logits[static_cast<size_t>(choice.tokens[i])];
    out.log_likelihood += static_cast<double>(own) - std::log(sum);
    out.greedy = out.greedy && std::ranges::max(logits) == own;
  }
  return out;
}

using Items = std::vector<std::vector<ChoiceTokens>>;

/// Items of one to five choices whose beginnings are equal up to different places.
Items some_items() {
  std::mt19937 random(3);
  const auto tokens = [&](size_t count) {
    std::vector<int32_t> out(count);
    std::ranges::generate(out, [&] { return static_cast<int32_t>(random() % kVocab); });
    return out;
  };
  Items items;
  for (size_t item = 0; item < 23; ++item) {
    const std::vector<int32_t> context = tokens(1 + random() % 40);
    std::vector<ChoiceTokens>& choices = items.emplace_back();
    for (size_t choice = 0; choice < 1 + item % 5; ++choice) {
      ChoiceTokens one{.tokens = context, .first_scored = std::ssize(context)};
      if (item % 7 == 3) {  // contexts of different ends, as WinoGrande has them
        one.tokens.push_back(static_cast<int32_t>(choice));
        ++one.first_scored;
      }
      const auto rest = tokens(1 + random() % (item % 3 == 0 ? 1 : 12));
      one.tokens.insert(one.tokens.end(), rest.begin(), rest.end());
      choices.push_back(one);
    }
  }
  items.push_back({items[4][0], items[4][0]});             // twice the same
  items.push_back({{.tokens = {1, 2}, .first_scored = 1},  // nothing shared
                   {.tokens = {3, 2, 5}, .first_scored = 1}});
  return items;
}

Result<std::vector<std::vector<ChoiceScore>>> score(Model& model, const Items& items) {
  const KvSpec layer{.kv_heads = 1, .key_dim = 2, .value_dim = 2};
  LogitReader reader =
      LogitReader::create(
          model,
          {.layers = {layer}, .longest = 100, .sequences = 4, .limits = {.tokens = 24, .rows = 7}})
          .value();
  ThreadPool pool(2);
  return score_choices(reader, items, {.pool = pool});
}

TEST(ChoiceScoring, EqualsChoicesReadOneByOne) {
  Remembering model;
  const Items items = some_items();
  const auto scores = score(model, items);
  ASSERT_TRUE(scores.ok());
  for (size_t item = 0; item < items.size(); ++item) {
    for (size_t choice = 0; choice < items[item].size(); ++choice) {
      const ChoiceScore expected = expected_score(items[item][choice]);
      const ChoiceScore& found = (*scores)[item][choice];
      EXPECT_NEAR(found.log_likelihood, expected.log_likelihood, 1e-9) << item << " " << choice;
      EXPECT_EQ(found.greedy, expected.greedy);
    }
  }
}

TEST(ChoiceScoring, ContextsAreComputedOnce) {
  Remembering model;
  std::vector<int32_t> context(50, 1);
  std::vector<ChoiceTokens> choices;
  for (int32_t choice = 0; choice < 4; ++choice) {
    ChoiceTokens one{.tokens = context, .first_scored = 50};
    one.tokens.insert(one.tokens.end(), {choice, 2, 3});
    choices.push_back(one);
  }
  ASSERT_TRUE(score(model, {choices}).ok());
  EXPECT_EQ(model.fed, 50 + 4 * 2);  // the last token of a choice predicts nothing
}

TEST(TaskResult, ThreeWaysToChoose) {
  Task task{.name = "t"};
  task.items.push_back({.choices = {{"", " abcd", 4, 8}, {"", " a", 1, 1}}, .gold = 0});
  task.items.push_back({.choices = {{"", " a", 1, 1}, {"", " b", 1, 1}}, .gold = 1});
  task.items.push_back({.choices = {{"", " a", 1, 1}}, .gold = 0});
  const std::vector<std::vector<ChoiceScore>> scores = {
      {{-4, false}, {-0.75, true}}, {{-1, false}, {-1, false}}, {{-2, true}}};
  const TaskAnswers answers = answers_of(task, scores);
  EXPECT_THAT(answers.acc, ElementsAre(0, 0, 1));  // of equal ones the first counts
  EXPECT_THAT(answers.acc_norm, ElementsAre(0, 0, 1));
  EXPECT_THAT(answers.acc_bytes, ElementsAre(1, 0, 1));  // -4/8 > -0.75
  EXPECT_THAT(answers.nll, ElementsAre(4, 1, 2));
}

}  // namespace
}  // namespace nibble
