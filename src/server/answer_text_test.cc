#include "server/answer_text.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(AnswerText, NeverEmitsHalfACharacter) {
  AnswerText text({}, false);
  EXPECT_EQ(text.push("a\xE2\x82"), "a");
  EXPECT_EQ(text.push("\xAC!"), "\xE2\x82\xAC!");
  EXPECT_EQ(text.push("\xF0\x9F"), "");
  EXPECT_EQ(text.finish(), "\xEF\xBF\xBD");
}

TEST(AnswerText, ReplacesWhatIsNoUtf8) {
  AnswerText text({}, false);
  EXPECT_EQ(text.push("\xFFx\xC0\xAF"), "\xEF\xBF\xBDx\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(AnswerText, FindsStopStringsHoweverTheTextIsCut) {
  const std::string whole = "one two STOP three";
  for (size_t size = 1; size <= whole.size(); ++size) {
    AnswerText text({"STOPPED", "STOP"}, false);
    std::string out;
    for (size_t at = 0; at < whole.size(); at += size) {
      out += text.push(whole.substr(at, size));
    }
    out += text.finish();
    EXPECT_EQ(out, "one two ") << size;
    EXPECT_EQ(text.matched_stop(), "STOP");
  }
}

TEST(AnswerText, GivesBackWhatOnlyLookedLikeAStop) {
  AnswerText text({"STOP"}, false);
  EXPECT_EQ(text.push("a ST"), "a ");
  EXPECT_EQ(text.push("AR"), "STAR");
  EXPECT_EQ(text.push(" STO"), " ");
  EXPECT_EQ(text.finish(), "STO");
  AnswerText kept({"b"}, true);
  EXPECT_EQ(kept.push("abc"), "ab");
}

}  // namespace
}  // namespace nibble
