#include "quantizer/algorithms/method.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Method, IsAChainThatEndsInARounding) {
  const Method method = parse_method("rotate,smooth,gptq").value();
  EXPECT_THAT(method.transforms, ElementsAre(Transform::kRotate, Transform::kSmooth));
  EXPECT_EQ(method.rounding, Rounding::kGptq);
  for (const char* name : {"rtn", "imatrix", "awq,rtn", "smooth,awq,gptq", "rotate,rtn",
                           "rotate,autoround", "awq,lwc", "rotate,turn,permute,gptq"}) {
    EXPECT_EQ(method_name(parse_method(name).value()), name);
  }
  EXPECT_EQ(method_name(parse_method("rotate").value()), "rotate,rtn");
}

TEST(Method, KnowsWhatNeedsAText) {
  EXPECT_FALSE(parse_method("rotate,turn").value().needs_text());
  EXPECT_TRUE(parse_method("permute,rtn").value().needs_text());
  EXPECT_FALSE(parse_method("rtn").value().needs_text());
  EXPECT_TRUE(parse_method("rotate,gptq").value().needs_text());
  EXPECT_TRUE(parse_method("smooth,rtn").value().needs_text());
  EXPECT_TRUE(parse_method("autoround").value().needs_text());
  EXPECT_TRUE(parse_method("lwc").value().needs_text());
}

TEST(Method, IsRefusedWithTheNamesThatThereAre) {
  const auto error = [](std::string_view text) { return parse_method(text).status().message(); };
  EXPECT_THAT(error("gptq,rotate"), HasSubstr("\"rotate\" comes after a rounding"));
  EXPECT_THAT(error("smooth,smooth,gptq"), HasSubstr("\"smooth\" is in it twice"));
  EXPECT_THAT(error("spin,gptq"), HasSubstr("rotate, smooth, awq, permute"));
  for (const char* text : {"", ",gptq", "rotate,,gptq", "rotate,"}) {
    EXPECT_FALSE(parse_method(text).ok()) << text;
  }
}

}  // namespace
}  // namespace nibble
