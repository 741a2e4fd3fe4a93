#include "eval/gsm8k.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace nibble {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string>& references() {
  static const std::vector<std::string> kAnswers = {
      "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "So 70,000 is left.\n#### 70,000",
      "It falls.\n#### -3", "Half of it.\n#### 2.5", "One.\n#### 7"};
  return kAnswers;
}

TEST(Gsm8k, GoldenAnswersAreAllRight) {
  for (const std::string& reference : references()) {
    EXPECT_TRUE(equals_reference(strict_answer(reference), reference)) << reference;
    EXPECT_TRUE(equals_reference(flexible_answer(reference), reference)) << reference;
  }
}

TEST(Gsm8k, DamagedAnswersAreAllWrong) {
  for (const std::string& reference : references()) {
    for (const std::string& damaged : {reference + "1", reference.substr(0, reference.size() - 1),
                                       reference + "\n#### 99", std::string()}) {
      const std::string text = damaged == reference + "\n#### 99" ? "#### 99" : damaged;
      EXPECT_FALSE(equals_reference(strict_answer(text), reference)) << text;
      EXPECT_FALSE(equals_reference(flexible_answer(text), reference)) << text;
    }
  }
}

// All 1,319 problems: references are right, with one more digit they are wrong.
TEST(Gsm8k, ReferencesOfTheTestSetScoreAll) {
  const char* named = std::getenv("NIBBLE_SHARED");
  const std::string path =
      std::string(named == nullptr ? "../shared" : named) + "/data/gsm8k/test.jsonl";
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << "no " << path << "; set NIBBLE_SHARED to its folder";
  }
  const auto problems = read_gsm8k(path, 0);
  ASSERT_TRUE(problems.ok()) << problems.status().message();
  ASSERT_EQ(problems->size(), 1319U);
  for (const GsmProblem& problem : *problems) {
    EXPECT_TRUE(equals_reference(strict_answer(problem.answer), problem.answer));
    EXPECT_TRUE(equals_reference(flexible_answer(problem.answer), problem.answer));
    const std::string damaged = problem.answer + "1";
    EXPECT_FALSE(equals_reference(strict_answer(damaged), problem.answer));
    EXPECT_FALSE(equals_reference(flexible_answer(damaged), problem.answer));
  }
}

// What Python's re finds with lm-eval's two expressions.
TEST(Gsm8k, ExtractsWhatTheExpressionsOfLmEvalFind) {
  EXPECT_EQ(strict_answer("#### 5 and #### 6"), "5");
  EXPECT_EQ(strict_answer("#### $5"), std::nullopt);
  EXPECT_EQ(strict_answer("#### x #### -1,000.5."), "-1,000.5.");
  EXPECT_EQ(strict_answer("####5"), std::nullopt);
  EXPECT_EQ(strict_answer("##### 5"), "5");
  EXPECT_EQ(strict_answer("#### -"), std::nullopt);
  EXPECT_EQ(flexible_answer("from 3 to $1,200. Done"), "$1,200.");
  EXPECT_EQ(flexible_answer("3 - 5"), "5");
  EXPECT_EQ(flexible_answer("3 -5"), "-5");
  EXPECT_EQ(flexible_answer("7."), "7.");
  EXPECT_EQ(flexible_answer("7 ..."), "...");
  EXPECT_EQ(flexible_answer("no number $ . -"), std::nullopt);
  EXPECT_EQ(flexible_answer("--12"), "-12");
}

TEST(Gsm8k, ComparesWithoutMarksAndSeparators) {
  EXPECT_TRUE(equals_reference("$1,200.", "so\n#### 1200"));
  EXPECT_TRUE(equals_reference("1200", "so\n#### 1,200"));
  EXPECT_FALSE(equals_reference("1200.0", "so\n#### 1200"));
  EXPECT_FALSE(equals_reference(std::nullopt, "so\n#### 1200"));
}

TEST(Gsm8k, PromptIsThatOfLmEval) {
  const std::vector<GsmProblem> examples = {{"q1", "a1\n#### 1"}, {"q2", "a2\n#### 2"}};
  EXPECT_EQ(gsm8k_prompt(examples, {"q", "#### 3"}),
            "Question: q1\nAnswer: a1\n#### 1\n\nQuestion: q2\nAnswer: a2\n#### 2\n\n"
            "Question: q\nAnswer:");
  EXPECT_EQ(gsm8k_prompt({}, {"q", ""}), "Question: q\nAnswer:");
}

TEST(Gsm8k, LinesAtFaultAreNamed) {
  const std::string path = (std::filesystem::path(::testing::TempDir()) /
                            ("gsm8k_test" + std::to_string(::getpid()) + ".jsonl"))
                               .string();
  const std::string good = R"({"question": "q", "answer": "a\n#### 1"})";
  for (const std::string bad : {R"({"question": "q"})", R"({"answer": "#### 1"})",
                                R"({"question": "q", "answer": "no number"})"}) {
    std::ofstream(path) << good << "\n" << bad << "\n";
    const Status status = read_gsm8k(path, 0).status();
    EXPECT_EQ(status.code(), StatusCode::kCorrupt);
    EXPECT_THAT(status.message(), HasSubstr("line 2"));
    EXPECT_EQ(read_gsm8k(path, 1)->size(), 1U);
  }
}

}  // namespace
}  // namespace nibble
