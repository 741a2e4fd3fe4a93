#include "text/text_stream.h"

#include <random>

#include <gtest/gtest.h>

namespace nibble {
namespace {

struct Outcome {
  std::string text;
  std::string found;
  bool operator==(const Outcome&) const = default;
};

// The definition, character by character over the whole text.
Outcome whole(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    const std::string_view head(text.data(), end);
    const std::string* best = nullptr;
    for (const std::string& stop : stops) {
      if (head.ends_with(stop) && (best == nullptr || stop.size() > best->size())) {
        best = &stop;
      }
    }
    if (best != nullptr) {
      return {text.substr(0, end - best->size()), *best};
    }
  }
  return {text, ""};
}

TEST(StopFilter, HoldsBackWhatMayBecomeAStop) {
  StopFilter filter({"stop", "\n\n"});
  EXPECT_EQ(filter.push("a st"), "a ");
  EXPECT_EQ(filter.push("ar\n"), "star");
  EXPECT_EQ(filter.push("b\n"), "\nb");
  EXPECT_FALSE(filter.stopped());
  EXPECT_EQ(filter.push("\nc"), "");
  EXPECT_TRUE(filter.stopped());
  EXPECT_EQ(filter.found(), "\n\n");
  EXPECT_EQ(filter.push("more"), "");
  EXPECT_EQ(filter.finish(), "");
}

TEST(StopFilter, FinishReleasesThePartialMatch) {
  StopFilter filter({"stop"});
  EXPECT_EQ(filter.push("x sto"), "x ");
  EXPECT_EQ(filter.finish(), "sto");
}

TEST(StopFilter, KeepsTheStopWhenAsked) {
  StopFilter filter({"END"}, StopText::kKeep);
  EXPECT_EQ(filter.push("abEN"), "ab");
  EXPECT_EQ(filter.push("Dcd"), "END");
}

TEST(StopFilter, WithoutStopsPassesEverything) {
  StopFilter filter({"", ""});
  EXPECT_EQ(filter.push("abc"), "abc");
  EXPECT_EQ(filter.finish(), "");
}

TEST(StopFilter, DoesNotDependOnTheCuts) {
  std::mt19937 random(1);
  const auto word = [&](size_t longest, int letters) {
    std::string out(1 + random() % longest, ' ');
    for (char& c : out) {
      c = static_cast<char>('a' + random() % static_cast<unsigned>(letters));
    }
    return out;
  };
  int stops_found = 0;
  for (int round = 0; round < 5000; ++round) {
    const std::string text = word(30, 3);
    const std::vector<std::string> stops = {word(4, 3), word(6, 3), word(6, 2)};
    const Outcome expected = whole(text, stops);
    StopFilter filter(stops);
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const size_t length = 1 + random() % 5;
      out += filter.push(std::string_view(text).substr(at, length));
      ASSERT_TRUE(expected.text.starts_with(out)) << "text was released too early";
      at += length;
    }
    out += filter.finish();
    ASSERT_EQ((Outcome{out, filter.found()}), expected) << text;
    stops_found += filter.stopped() ? 1 : 0;
  }
  EXPECT_GT(stops_found, 1000);
  EXPECT_LT(stops_found, 4900);
}

}  // namespace
}  // namespace nibble
