#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "text/grammar/json_schema_grammar.h"
#include "text/grammar/testing/byte_grammar.h"

namespace nibble {
namespace {

using ::testing::StartsWith;

struct Case {
  const char* schema;
  std::vector<const char*> allowed;
  std::vector<const char*> forbidden;
};

void check(const Case& each) {
  static ByteGrammars grammars;
  const auto grammar = grammars.schema(each.schema);
  ASSERT_TRUE(grammar.ok()) << each.schema << ": " << grammar.status().message();
  for (const char* text : each.allowed) {
    EXPECT_TRUE(grammars.allows(**grammar, text)) << each.schema << " allows " << text;
  }
  for (const char* text : each.forbidden) {
    EXPECT_FALSE(grammars.allows(**grammar, text)) << each.schema << " forbids " << text;
  }
}

std::string refusal(std::string_view schema) {
  JsonSchemaGrammar rules;
  const auto json = Json::parse(schema);
  EXPECT_TRUE(json.ok()) << schema;
  const auto added = rules.add(*json);
  EXPECT_FALSE(added.ok()) << schema;
  return added.status().message();
}

TEST(JsonSchema, TypesAndValues) {
  check({"{}", {"1", "\"a\"", "[1, {}]", "null", "-0.5e+3"}, {"", "tru", "1e999", "\"\n\""}});
  check({R"({"type":"boolean"})", {"true", "false"}, {"null", "1"}});
  check({R"({"type":["string","null"]})", {"null", "\"\\u00e9\\n\""}, {"1", "\"\\ud83d\""}});
  check({R"({"type":"integer"})", {"0", "-12"}, {"1.0", "01", "1e2"}});
  check({R"({"enum":["a",1,null,[1,"x"]]})", {"\"a\"", "1", "null", "[1,\"x\"]"}, {"2", "\"b\""}});
  check({R"({"type":"string","enum":["a",1]})", {"\"a\""}, {"1"}});
  check({R"({"const":{"a":"\"/"}})", {R"({"a":"\"/"})"}, {"{}"}});
  check({R"({"$ref":"#/$defs/a~1b","$defs":{"a/b":{"type":"null"}}})", {"null"}, {"1"}});
  check({R"({"anyOf":[{"type":"integer"},{"type":"null"}],"title":"t"})", {"1", "null"}, {"\"\""}});
  check({R"({"allOf":[{"type":"integer"}]})", {"1"}, {"null"}});
}

TEST(JsonSchema, Numbers) {
  check({R"({"type":"integer","minimum":-5,"maximum":120})",
         {"-5", "-1", "0", "7", "99", "100", "120"},
         {"-6", "121", "1000", "-0", "007"}});
  check({R"({"type":"integer","exclusiveMinimum":9})", {"10", "11", "5000000"}, {"9", "0", "-10"}});
  check({R"({"type":"integer","maximum":-3})", {"-3", "-10"}, {"-2", "0", "3"}});
  check(
      {R"({"type":"integer","minimum":1,"maximum":20,"multipleOf":5})", {"5", "20"}, {"1", "25"}});
  check({R"({"type":"number","minimum":0,"maximum":1})",
         {"0", "1", "0.5", "1.0", "0.000001"},
         {"1.1", "1.000001", "-0.1", "2", "1e0"}});
  check({R"({"type":"number","exclusiveMinimum":-1.5,"exclusiveMaximum":2.25})",
         {"-1.49", "-1", "-0.1", "0.3", "2.24", "2", "2.249999"},
         {"-1.5", "-1.6", "2.25", "2.3", "3", "-1.50"}});
  check({R"({"type":"number","minimum":0.1})", {"0.1", "0.2", "7", "123.5"}, {"0.09", "0", "-1"}});
  check({R"({"minimum":3})", {"3.5"}, {"2", "\"a\""}});  // without a type: that of the keyword
}

TEST(JsonSchema, Strings) {
  check({R"({"type":"string","maxLength":3})",
         {"\"\"", "\"abc\"", "\"\\n\\u0041c\"", "\"éé漢\""},
         {"\"abcd\"", "\"ab\\n\\n\"", "\"éé漢x\""}});
  check({R"({"type":"string","minLength":2})", {"\"ab\"", "\"a\\\"\""}, {"\"a\"", "\"\""}});
  check({R"({"type":"string","minLength":1,"maxLength":1})", {"\"a\""}, {"\"\"", "\"ab\""}});
  check({R"({"type":"array","items":{"type":"string","maxLength":2}})",
         {R"(["ab", "c", ""])"},
         {R"(["ab", "cde"])"}});
  check({R"({"type":"string","pattern":"^[a-c]+-\\d{2}$"})",
         {"\"ab-12\""},
         {"\"ab-1\"", "\"d-12\"", "\"x ab-12\""}});
  check({R"({"type":"string","pattern":"[^\\s@]+@x"})", {"\"a@x\""}, {"\"é@x\"", "\"a b@x\""}});
  check({R"({"type":"string","format":"date"})",
         {"\"2024-02-29\"", "\"2023-12-31\"", "\"2000-02-29\""},
         {"\"2023-02-29\"", "\"2023-13-01\"", "\"1900-02-29\"", "\"2023-04-31\""}});
  check({R"({"type":"string","format":"ipv4"})", {"\"10.0.255.1\""}, {"\"256.0.0.1\"", "\"1.2\""}});
}

TEST(JsonSchema, Objects) {
  const char* closed = R"({"type":"object","properties":{"a":{"type":"integer"},)"
                       R"("b":{"type":"null"},"c":{"type":"boolean"}},"required":["b"]})";
  check({closed,
         {R"({"b":null})", R"({"a":1,"b":null})", R"({"b": null, "c": true})",
          "{\n  \"a\": 1,\n  \"b\": null,\n  \"c\": false\n}"},
         {"{}", R"({"a":1})", R"({"b":null,"d":1})", R"({"b":null,"a":1})", R"({"b":null,})"}});
  check({R"({"type":"object"})", {"{}", R"({"x":[1]})"}, {"[]"}});
  check({R"({"type":"object","additionalProperties":{"type":"integer"},"minProperties":1})",
         {R"({"x":1,"y":2})"},
         {"{}", R"({"x":"1"})"}});
  const char* open =
      R"({"type":"object","properties":{"ab":{"type":"integer"},"a":{"type":"null"}},)"
      R"("additionalProperties":{"type":"string"}})";
  check({open,
         {"{}", R"({"ab":1,"abc":"x"})", R"({"b":"x"})", R"({"a":null,"":"x"})"},
         {R"({"ab":"x"})", R"({"a":1,"a":"x"})", R"({"\u0061":"x"})", R"({"abc":1})"}});
  check({R"({"type":"object","patternProperties":{"^x-[a-z]+$":{"type":"integer"}}})",
         {R"({"x-a":1,"x-b":2})"},
         {R"({"y":1})", R"({"x-a":null})"}});
  check({R"({"type":"object","required":["k"]})", {R"({"k":[]})"}, {"{}"}});
  check({R"({"type":"object","properties":{"n":{"$ref":"#"}}})",
         {R"({"n":{"n":{}}})"},
         {R"({"n":1})"}});
}

TEST(JsonSchema, Arrays) {
  check({R"({"type":"array","items":{"type":"integer"},"minItems":1,"maxItems":3})",
         {"[1]", "[1, 2,3]"},
         {"[]", "[1,2,3,4]", "[1,]", "[null]"}});
  check({R"({"prefixItems":[{"type":"integer"},{"type":"null"}],"items":false})",
         {"[1,null]"},
         {"[1,null,2]", "[null,1]"}});
  check(
      {R"({"type":"array","prefixItems":[{"type":"null"}],"items":{"type":"integer"},"minItems":2})",
       {"[null,1]", "[null,1,2]"},
       {"[null]", "[1]"}});
  check({R"({"type":"array","maxItems":0})", {"[]", "[ ]"}, {"[1]"}});
}

TEST(JsonSchema, OneOfNeedsSchemasThatExcludeEachOther) {
  check({R"({"oneOf":[{"type":"integer"},{"type":"string"}]})", {"1", "\"\""}, {"null"}});
  check({R"({"oneOf":[{"type":"object","properties":{"k":{"const":"a"}},"required":["k"]},)"
         R"({"type":"object","properties":{"k":{"const":"b"},"n":{}},"required":["k"]}]})",
         {R"({"k":"a"})", R"({"k":"b","n":1})"},
         {R"({"k":"c"})", R"({"k":"a","n":1})"}});
  EXPECT_THAT(refusal(R"({"oneOf":[{"type":"integer"},{"type":"number"}]})"),
              StartsWith("#/oneOf"));
  EXPECT_THAT(refusal(R"({"oneOf":[{"properties":{}},{"type":"string"}]})"), StartsWith("#/oneOf"));
  EXPECT_THAT(refusal(R"({"oneOf":[{"const":1},{"const":1.0}]})"), StartsWith("#/oneOf"));
}

TEST(JsonSchema, RefusesWhatItWouldNotEnforce) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"allOf":[{"type":"integer"},{"minimum":3}]})", "#/allOf: "},
      {R"({"type":"string","pattern":"a","maxLength":3})", "#/maxLength: "},
      {R"({"type":"string","format":"email","minLength":3})", "#/minLength: "},
      {R"({"type":"string","format":"date","pattern":"a"})", "#/format: "},
      {R"({"type":"string","format":"regex"})", "#/format: "},
      {R"({"type":"string","minLength":1000})", "#/minLength: "},
      {R"({"type":"string","pattern":"(?=a)b"})", "#/pattern: "},
      {R"({"type":"string","pattern":"a\\b"})", "#/pattern: "},
      {R"({"minimum":3,"minLength":2})", "#: "},
      {R"({"type":"array","uniqueItems":true})", "#/uniqueItems: "},
      {R"({"type":"array","contains":{}})", "#/contains: "},
      {R"({"type":"object","properties":{"a/b":{"not":{}}}})", "#/properties/a~1b/not: "},
      {R"({"if":{},"then":{}})", "#/if: "},
      {R"({"type":"object","dependentRequired":{"a":["b"]}})", "#/dependentRequired: "},
      {R"({"$ref":"#/$defs/a","minimum":1,"$defs":{"a":{}}})", "#/minimum: "},
      {R"({"anyOf":[{}],"type":"integer"})", "#/type: "},
      {R"({"enum":[1,2],"minimum":2})", "#/minimum: "},
      {R"({"$ref":"http://example.com/a"})", "#/$ref: "},
      {R"({"$ref":"#/nowhere"})", "#/$ref: "},
      {R"({"$ref":"#"})", "#: "},
      {R"({"anyOf":[{"$ref":"#"},{"type":"null"}]})", "#: "},
      {R"({"type":"number","multipleOf":0.1})", "#/multipleOf: "},
      {R"({"type":"integer","multipleOf":3})", "#/multipleOf: "},
      {R"({"type":"integer","minimum":3,"maximum":2})", "#: "},
      {R"({"type":"integer","exclusiveMinimum":true})", "#/exclusiveMinimum: "},
      {R"({"type":"array","items":[{}]})", "#/items: "},
      {R"({"type":"object","minProperties":2})", "#/minProperties: "},
      {R"({"type":"object","patternProperties":{"a":{},"b":{}}})", "#/patternProperties: "},
      {R"({"type":"object","required":["a"],"additionalProperties":false})", "#/required: "},
      {R"({"type":"object","properties":{"a":false}})", "#/properties/a: "},
      {R"({"type":"text"})", "#/type: "},
      {R"({"type":"object","properties":[]})", "#/properties: "},
      {R"({"anyOf":[]})", "#/anyOf: "},
      {R"({"enum":[]})", "#/enum: "},
  };
  for (const auto& [schema, pointer] : cases) {
    EXPECT_THAT(refusal(schema), StartsWith(pointer)) << schema;
  }
}

TEST(JsonSchema, LargeOnesAreRefusedAndDeepOnesAreNot) {
  JsonArray options;
  for (int64_t i = 0; i < 5000; ++i) {
    options.push_back(Json::object({{"type", "array"}, {"maxItems", i}}));
  }
  JsonSchemaGrammar rules;
  const auto added = rules.add(Json::object({{"anyOf", std::move(options)}}));
  ASSERT_FALSE(added.ok());
  EXPECT_THAT(added.status().message(), ::testing::HasSubstr("too large"));
  std::string deep = "{}";
  for (int i = 0; i < 60; ++i) {
    deep = R"({"type":"array","items":)" + deep + "}";
  }
  EXPECT_TRUE(JsonSchemaGrammar().add(Json::parse(deep).value()).ok());
}

/// A schema with `count` members: `schema(i)` is that of the i-th.
template <typename Schema>
Json members_of(int64_t count, const Schema& schema) {
  JsonObject properties;
  for (int64_t i = 0; i < count; ++i) {
    properties.append("p" + std::to_string(i), *Json::parse(schema(i)));
  }
  return Json::object({{"type", "object"}, {"properties", std::move(properties)}});
}

TEST(JsonSchema, AllOfARequestShareOneBudget) {
  std::string (*schemas[])(int64_t) = {
      [](int64_t i) {
        return fmt::format(R"({{"type":"string","pattern":"^(.{{1,30}}|{}[a-z]{{1,30}})$"}})", i);
      },
      [](int64_t i) {
        return fmt::format(R"({{"type":"string","minLength":30,"maxLength":{}}})", 40 + i);
      },
      [](int64_t i) {
        return fmt::format(R"({{"type":"object","patternProperties":{{"^{}[^a]{{1,40}}$":{{}}}}}})",
                           i);
      },
  };
  for (const auto& schema : schemas) {
    EXPECT_TRUE(JsonSchemaGrammar().add(members_of(5, schema)).ok()) << schema(0);
    const auto many = JsonSchemaGrammar().add(members_of(250, schema));
    ASSERT_FALSE(many.ok()) << schema(0);
    EXPECT_THAT(many.status().message(), ::testing::HasSubstr("together"));
    EXPECT_THAT(many.status().message(), StartsWith("#/properties/p"));
    JsonSchemaGrammar tools;
    int64_t taken = 0;
    while (tools.add(members_of(2, schema)).ok()) {
      ASSERT_LT(++taken, 250) << schema(0);
    }
    EXPECT_GE(taken, 3) << schema(0);
  }
  // What is the same costs once.
  const auto date = [](int64_t) { return R"({"type":"string","format":"date-time"})"; };
  EXPECT_TRUE(JsonSchemaGrammar().add(members_of(500, date)).ok());
}

TEST(JsonSchema, ReadingTakesABoundedTime) {
  // Chains of references, each followed again and again.
  std::string text = R"({"$defs":{"c0":{"type":"null"})";
  for (int i = 1; i < 3000; ++i) {
    text += fmt::format(R"(,"c{}":{{"$ref":"#/$defs/c{}"}})", i, i - 1);
  }
  text += R"(},"anyOf":[{"type":"null"})";
  for (int i = 0; i < 400; ++i) {
    text += R"(,{"oneOf":[{"$ref":"#/$defs/c2999"},{"type":"string"}]})";
  }
  EXPECT_THAT(refusal(text + "]}"), ::testing::HasSubstr("it takes too long"));
  // Lists of values, each compared with each.
  JsonArray values, others;
  for (int64_t i = 0; i < 3000; ++i) {
    values.emplace_back(i);
    others.emplace_back(i + 3000);
  }
  const Json lists = Json::object(
      {{"oneOf", JsonArray{Json::object({{"enum", values}}), Json::object({{"enum", others}})}}});
  EXPECT_THAT(refusal(lists.dump()), StartsWith("#/oneOf: it takes too long"));
  EXPECT_THAT(refusal(Json::object({{"const", std::string(600'000, 'x')}}).dump()),
              ::testing::HasSubstr("512 KiB"));
}

TEST(JsonSchema, PlacesOfLongNamesAreCut) {
  const std::string name(50'000, 'n');
  const auto inner = [](int64_t) { return R"({"not":{}})"; };
  const Json schema = Json::object(
      {{"type", "object"}, {"properties", Json::object({{name, members_of(1000, inner)}})}});
  const std::string message = refusal(schema.dump());
  EXPECT_THAT(message, StartsWith("#/properties/nnnn"));
  EXPECT_LT(message.size(), 300U);
  // One rule for each character of a name that others may not have.
  const Json open = Json::object({{"type", "object"},
                                  {"properties", Json::object({{name, JsonObject()}})},
                                  {"additionalProperties", true}});
  EXPECT_THAT(refusal(open.dump()), ::testing::HasSubstr("take too long to prepare together"));
}

}  // namespace
}  // namespace nibble
