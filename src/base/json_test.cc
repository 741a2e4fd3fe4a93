#include "base/json.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(Json, RoundTripsEveryType) {
  const std::string text =
      R"({"a":null,"b":[true,false,-3,9223372036854775807,18446744073709551615,0.7,100.0,1e+22],)"
      R"("c":"\"\\\n\u0001é😀","d":{}})";
  auto json = Json::parse(text);
  ASSERT_TRUE(json.ok()) << json.status().message();
  const JsonArray& array = json->find("b")->as_array();
  EXPECT_EQ(array[3].as_int(), INT64_MAX);
  EXPECT_EQ(array[4].type(), Json::Type::kUint);
  EXPECT_EQ(json->find("c")->as_string(), "\"\\\n\x01é😀");
  EXPECT_EQ(json->dump(), text);
  EXPECT_EQ(Json::parse(json->dump_pretty())->dump(), text);
}

TEST(Json, RefusesWhatIsNotJson) {
  for (const char* text :
       {"", "{", "{\"a\":1,}", "[1,]", "NaN", "1e999", "01", "\"\xff\"", "\"\\ud800\"", "[] x",
        "{\"a\":1,\"a\":2}", "\xef\xbb\xbf{}", "\"\t\"", "// c\n1", "\"\xc0\xaf\""}) {
    EXPECT_FALSE(Json::parse(text).ok()) << text;
  }
  EXPECT_FALSE(Json::parse(std::string(100000, '[')).ok());
  EXPECT_TRUE(Json::parse(std::string(200, '[') + std::string(200, ']')).ok());
}

TEST(Json, LargeObjectsKeepOrderAndFindEveryKey) {
  JsonObject object;
  for (int i = 0; i < 100; ++i) {
    object.set("k" + std::to_string(i), i);
  }
  EXPECT_TRUE(object.erase("k50"));
  EXPECT_FALSE(object.erase("k50"));
  const JsonObject copy = object;
  EXPECT_EQ(copy.find("k50"), nullptr);
  EXPECT_EQ(copy.find("k99")->as_int(), 99);
  EXPECT_EQ(std::next(copy.begin(), 50)->first, "k51");
}

TEST(Json, PrintsDoublesAsPythonDoes) {
  EXPECT_EQ(format_double(0.7), "0.7");
  EXPECT_EQ(format_double(100), "100.0");
  EXPECT_EQ(format_double(-0.0), "-0.0");
  EXPECT_EQ(format_double(1e16), "1e+16");
  EXPECT_EQ(format_double(123456789012345680.0), "1.2345678901234568e+17");
  EXPECT_EQ(format_double(0.0001), "0.0001");
  EXPECT_EQ(format_double(0.00001), "1e-05");
}

TEST(Json, StringsReplaceInvalidUtf8) {
  EXPECT_EQ(Json(std::string("a\xff"
                             "b"))
                .dump(),
            "\"a\xef\xbf\xbd"
            "b\"");
}

TEST(JsonReader, NamesFileAndField) {
  const auto json = Json::parse(R"({"n":"x","z":null})");
  const JsonReader reader(*json, "config.json");
  const auto wrong = reader.required_int("n");
  EXPECT_EQ(wrong.status().message(),
            "config.json: field \"n\": expected an integer, got a string");
  EXPECT_NE(reader.required_int("z").status().message().find("missing"), std::string::npos);
  EXPECT_EQ(*reader.optional_int("z", 7), 7);
}

}  // namespace
}  // namespace nibble
