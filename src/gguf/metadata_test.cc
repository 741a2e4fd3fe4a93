#include "gguf/metadata.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gguf/file.h"
#include "gguf/testing/gguf_builder.h"

namespace nibble::gguf {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class GgufMetadata : public testing::Test {
 protected:
  // Parses what builder_ has.
  const Metadata& metadata() {
    bytes_ = builder_.build();
    auto content = parse_gguf(std::as_bytes(std::span(bytes_)), "m.gguf");
    EXPECT_TRUE(content.ok()) << content.status().message();
    content_ = std::move(*content);
    return content_.metadata;
  }

  GgufBuilder builder_;
  std::string bytes_;
  Content content_{"m.gguf"};
};

template <typename T>
void expect_error(const Result<T>& result, const std::string& text) {
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kCorrupt);
  EXPECT_THAT(result.status().message(), HasSubstr(text));
}

TEST_F(GgufMetadata, IntegersOfEveryTypeAreRead) {
  builder_.add("u8", uint8_t{200}).add("i8", int8_t{100}).add("u16", uint16_t{60000});
  builder_.add("i16", int16_t{30000}).add("u32", uint32_t{4'000'000'000U}).add("i32", int32_t{7});
  builder_.add("u64", std::numeric_limits<uint64_t>::max()).add("i64", int64_t{1} << 60);
  const Metadata& values = metadata();
  EXPECT_EQ(*values.require_uint("u8"), 200U);
  EXPECT_EQ(*values.require_uint("i8"), 100U);
  EXPECT_EQ(*values.require_uint("u16"), 60000U);
  EXPECT_EQ(*values.require_uint("i16"), 30000U);
  EXPECT_EQ(*values.require_uint("u32"), 4'000'000'000U);
  EXPECT_EQ(*values.require_uint("i32"), 7U);
  EXPECT_EQ(*values.require_count("i32"), 7);
  EXPECT_EQ(*values.optional_count("i32", -1), 7);
  EXPECT_EQ(*values.optional_count("missing", -1), -1);
  EXPECT_EQ(values.require_count("missing").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(values.optional_count("u32", -1).status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(*values.require_uint("u64"), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(*values.require_uint("i64"), uint64_t{1} << 60);
  EXPECT_EQ(*values.require_float("i64"), 0x1p60);
  EXPECT_EQ(values.entries().size(), 8U);
  EXPECT_EQ(values.entries()[1].first, "i8");
}

TEST_F(GgufMetadata, OtherValuesAreRead) {
  builder_.add("f32", 0.1F).add("f64", 0.1).add("yes", true).add("no", false);
  builder_.add("text", std::string("a\0b", 3)).add("empty", "");
  const Metadata& values = metadata();
  EXPECT_EQ(*values.require_float("f32"), static_cast<double>(0.1F));
  EXPECT_EQ(*values.require_float("f64"), 0.1);
  EXPECT_TRUE(*values.require_bool("yes"));
  EXPECT_FALSE(*values.require_bool("no"));
  EXPECT_EQ(*values.require_string("text"), std::string_view("a\0b", 3));
  EXPECT_EQ(*values.require_string("empty"), "");
}

TEST_F(GgufMetadata, ArraysAreRead) {
  builder_.add_array<std::string>("tokens", {"a", "", "\xff\xfe"});
  builder_.add_array<float>("scores", {0.5F, -1.5F}).add_array<double>("wide", {0.1});
  builder_.add_array<int32_t>("types", {-1, 2}).add_array<uint8_t>("small", {255});
  builder_.add_array<bool>("flags", {true, false}).add_array<int64_t>("none", {});
  const Metadata& values = metadata();
  EXPECT_THAT(*values.require_strings("tokens"), ElementsAre("a", "", "\xff\xfe"));
  EXPECT_THAT(*values.require_floats("scores"), ElementsAre(0.5F, -1.5F));
  EXPECT_THAT(*values.require_floats("wide"), ElementsAre(0.1F));
  EXPECT_THAT(*values.require_floats("types"), ElementsAre(-1.0F, 2.0F));
  EXPECT_THAT(*values.require_ints("types"), ElementsAre(-1, 2));
  EXPECT_THAT(*values.require_ints("small"), ElementsAre(255));
  EXPECT_THAT(*values.require_ints("flags"), ElementsAre(1, 0));
  EXPECT_TRUE(values.require_ints("none")->empty());
  EXPECT_EQ(values.find("tokens")->count, 3);
  EXPECT_TRUE(values.find("tokens")->is_array);
}

TEST_F(GgufMetadata, MissingKeysAreNamedOrReplaced) {
  const Metadata& values = metadata();
  EXPECT_EQ(values.find("x.y"), nullptr);
  expect_error(values.require_uint("x.y"), "m.gguf: metadata has no x.y;");
  expect_error(values.require_float("x.y"), "x.y");
  expect_error(values.require_bool("x.y"), "x.y");
  expect_error(values.require_string("x.y"), "x.y");
  expect_error(values.require_strings("x.y"), "x.y");
  expect_error(values.require_ints("x.y"), "x.y");
  expect_error(values.require_floats("x.y"), "x.y");
  EXPECT_EQ(*values.optional_uint("x.y", 3), 3U);
  EXPECT_EQ(*values.optional_float("x.y", 0.5), 0.5);
  EXPECT_TRUE(*values.optional_bool("x.y", true));
  EXPECT_EQ(*values.optional_string("x.y", "d"), "d");
}

TEST_F(GgufMetadata, OtherTypesAreNamed) {
  builder_.add("text", "7").add("half", 0.5F).add("flag", true).add("negative", int32_t{-2});
  builder_.add_array<int32_t>("ints", {}).add_array<std::string>("texts", {"a"});
  builder_.add_array<float>("floats", {1.0F}).add_array<uint64_t>("huge", {1, uint64_t{1} << 63});
  const Metadata& values = metadata();
  expect_error(values.require_uint("text"),
               "m.gguf: metadata text: expected an integer, got a value of type string;");
  expect_error(values.require_uint("half"), "expected an integer, got a value of type f32");
  expect_error(values.require_uint("flag"), "got a value of type bool");
  expect_error(values.require_uint("negative"), "negative is -2, but must not be negative");
  expect_error(values.require_uint("ints"), "expected an integer, got an array of i32");
  expect_error(values.require_float("flag"), "expected a number");
  expect_error(values.require_float("floats"), "got an array of f32");
  expect_error(values.require_bool("negative"), "expected a bool");
  expect_error(values.require_string("texts"), "expected a string, got an array of string");
  expect_error(values.require_strings("text"), "expected an array of strings");
  expect_error(values.require_strings("ints"), "got an array of i32");
  expect_error(values.require_ints("floats"), "expected an array of integers, got an array of f32");
  expect_error(values.require_ints("texts"), "got an array of string");
  expect_error(values.require_ints("huge"), "element 1 is 9223372036854775808");
  expect_error(values.require_floats("texts"), "expected an array of numbers");
  // Present, so that the fallback does not hide it.
  expect_error(values.optional_uint("text", 3), "expected an integer");
  expect_error(values.optional_string("half", ""), "expected a string");
  expect_error(values.optional_float("text", 0), "expected a number");
  expect_error(values.optional_bool("text", false), "expected a bool");
}

}  // namespace
}  // namespace nibble::gguf
