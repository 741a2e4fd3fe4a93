#include "progress.h"

#include <string>

#include <gtest/gtest.h>

#include "flag_checks.h"

namespace nibble {
namespace {

constexpr auto kBytes = ProgressDisplay::Unit::kBytes;
constexpr auto kTokens = ProgressDisplay::Unit::kTokens;

TEST(Progress, ShowsRateAndTimeLeft) {
  EXPECT_EQ(progress_text(30'000'000, 120'000'000, 3, kBytes),
            "[#######.......................]  25% 10.0 MB/s, 0:09 left");
  EXPECT_EQ(progress_text(500, 1000, 100, kTokens),
            "[###############...............]  50% 5 tokens/s, 1:40 left");
  EXPECT_EQ(progress_text(1, 10'001, 1, kTokens).substr(33), "  0% 1 tokens/s, 2:46:40 left");
}

TEST(Progress, EndsWithTheTimeItTook) {
  EXPECT_EQ(progress_text(1000, 1000, 62, kTokens),
            "[##############################] 100% 16 tokens/s, took 1:02");
}

TEST(Progress, HundredPercentOnlyWhenDone) {
  EXPECT_EQ(progress_text(999'999, 1'000'000, 1, kTokens).substr(33, 4), " 99%");
}

TEST(Progress, NothingDoneAndNothingToDo) {
  EXPECT_EQ(progress_text(0, 10, 0, kTokens).substr(33), "  0% 0 tokens/s, ? left");
  EXPECT_EQ(progress_text(0, 0, 0, kBytes).substr(33), "100% 0.0 MB/s, took 0:00");
}

TEST(WholeNumber, AcceptsTheRangeOnly) {
  const CLI::Validator check = whole_number(1, 10);
  const auto refusal = [&](std::string text) { return check(text); };
  EXPECT_EQ(refusal("1"), "");
  EXPECT_EQ(refusal("10"), "");
  for (const char* text : {"0", "11", "-1", "1.5", "", "ten", "1 ", "99999999999999999999"}) {
    EXPECT_EQ(refusal(text), std::string(text) + " is not a whole number between 1 and 10");
  }
}

}  // namespace
}  // namespace nibble
