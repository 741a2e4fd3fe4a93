#include "base/glob.h"

#include <gtest/gtest.h>

#include "base/file.h"
#include "base/json_lines.h"

namespace nibble {
namespace {

TEST(MatchesGlob, StarsCoverAnyText) {
  EXPECT_TRUE(matches_glob("a.b", "a.b"));
  EXPECT_TRUE(matches_glob("*", ""));
  EXPECT_TRUE(matches_glob("*.q_proj", "model.layers.0.self_attn.q_proj"));
  EXPECT_TRUE(matches_glob("m*.experts.*.up*", "model.experts.experts.7.up_proj"));
  EXPECT_TRUE(matches_glob("a**b", "ab"));
  EXPECT_FALSE(matches_glob("*.q_proj", "q_proj"));
  EXPECT_FALSE(matches_glob("*.gate", "mlp.gate_proj"));
  EXPECT_FALSE(matches_glob("a*b*c", "a-b-b"));
  EXPECT_FALSE(matches_glob("", "a"));
}

TEST(MatchesGlob, ClassesNameCharacters) {
  EXPECT_TRUE(matches_glob("model.layers.[0-3].*", "model.layers.2.mlp"));
  EXPECT_FALSE(matches_glob("model.layers.[0-3].*", "model.layers.12.mlp"));
  EXPECT_TRUE(matches_glob("*.[!qk]_proj", "attn.v_proj"));
  EXPECT_TRUE(matches_glob("a[[]0]", "a[0]"));
  EXPECT_TRUE(matches_glob("?", "\u00e9"));
  EXPECT_FALSE(matches_glob("a\\*", "a*"));  // nothing is escaped by a backslash
}

// Of fnmatch.fnmatchcase(), by tests/data/fnmatch/make_vectors.py.
TEST(MatchesGlob, IsFnmatchOfPython) {
  const std::string path = "tests/data/fnmatch/vectors.jsonl";
  const auto text = read_file(path);
  ASSERT_TRUE(text.ok()) << text.status().message();
  int64_t count = 0;
  const Status read =
      for_each_json_line({.text = *text, .where = path}, [&](const Json& line) -> Status {
        EXPECT_EQ(matches_glob(line.find("pattern")->as_string(), line.find("text")->as_string()),
                  line.find("match")->as_bool())
            << line.dump();
        ++count;
        return {};
      });
  EXPECT_TRUE(read.ok()) << read.message();
  EXPECT_GE(count, 2500);
}

}  // namespace
}  // namespace nibble
