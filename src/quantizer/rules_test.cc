#include "quantizer/rules.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::HasSubstr;

RuleOptions options_for(std::string_view scheme = "w4a16_g32") {
  RuleOptions options;
  options.scheme = find_scheme(scheme).value();
  return options;
}

Json config_of(const char* text) { return Json::parse(text).value(); }

// "w4a8: --rule x" or "keep: ...".
std::string decided(RuleSet& rules, std::string_view module) {
  const Decision decision = rules.decide(module).value();
  return fmt::format("{}: {}", decision.scheme ? decision.scheme->name : "keep", decision.rule);
}

TEST(ModulePattern, RefusesNothingAndBadExpressions) {
  EXPECT_EQ(ModulePattern::parse("").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ModulePattern::parse("re:(").status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(ModulePattern::parse("re:.*[kv]_proj").value().matches("a.k_proj").value());
  EXPECT_FALSE(ModulePattern::parse("re:k_proj").value().matches("a.k_proj").value());
}

TEST(ModuleKind, IsToldByTheName) {
  const auto kind = [](std::string_view module) { return module_kind(module, 61); };
  EXPECT_EQ(kind("model.layers.3.mlp.gate"), ModuleKind::kRouter);
  EXPECT_EQ(kind("model.layers.3.mlp.gate_proj"), ModuleKind::kLinear);
  EXPECT_EQ(kind("model.layers.3.mlp.router"), ModuleKind::kRouter);
  EXPECT_EQ(kind("language_model.model.layers.3.mlp.experts.17.up_proj"),
            ModuleKind::kRoutedExpert);
  EXPECT_EQ(kind("model.layers.3.mlp.shared_experts.up_proj"), ModuleKind::kLinear);
  EXPECT_EQ(kind("model.layers.61.mlp.experts.0.up_proj"), ModuleKind::kPrediction);
  EXPECT_EQ(kind("model.layers.60.mlp.experts.0.up_proj"), ModuleKind::kRoutedExpert);
  EXPECT_EQ(module_kind("model.layers.61.self_attn.q_proj", 0), ModuleKind::kLinear);
  EXPECT_EQ(kind("mtp.layers.0.eh_proj"), ModuleKind::kPrediction);
  EXPECT_EQ(kind("model.embed_tokens"), ModuleKind::kEmbedding);
  EXPECT_EQ(kind("model.layers.3.self_attn.q_norm"), ModuleKind::kNorm);
  EXPECT_EQ(kind("lm_head"), ModuleKind::kHead);
  EXPECT_EQ(kind("model.layers.3.linear_attn.conv1d"), ModuleKind::kState);
  EXPECT_EQ(kind("vision_tower.blocks.0.wqkv"), ModuleKind::kVision);
}

TEST(RuleSet, TheFirstRuleDecidesBeforeIgnoreAndIncludeAndTheModel) {
  RuleOptions options = options_for();
  options.rules = {"*.o_proj=keep", "re:.*attn=w8a8_int8"};
  options.ignore = {"*.up_proj", "*.o_proj"};
  options.include = {"lm_head"};
  RuleSet rules = RuleSet::create(options, config_of("{}")).value();
  EXPECT_EQ(decided(rules, "a.attn.o_proj"), "keep: --rule *.o_proj=keep");
  EXPECT_EQ(decided(rules, "a.attn.q_proj"), "w8a8_int8: --rule re:.*attn=w8a8_int8");
  EXPECT_EQ(decided(rules, "a.mlp.up_proj"), "keep: --ignore *.up_proj");
  EXPECT_EQ(decided(rules, "lm_head"), "w4a16_g32: --include lm_head");
  EXPECT_EQ(decided(rules, "a.mlp.down_proj"), "w4a16_g32: default: linear layers");
  EXPECT_EQ(decided(rules, "a.mlp.gate"), "keep: default: a router stays");
  EXPECT_TRUE(rules.check_all_used().ok());
}

TEST(RuleSet, TheSchemeOfTheHeadComesBeforeAllRules) {
  RuleOptions options = options_for();
  options.head = find_scheme("w8a16_channel").value();
  options.rules = {"re:.*=w8a8_int8"};
  RuleSet rules = RuleSet::create(options, config_of("{}")).value();
  EXPECT_EQ(decided(rules, "lm_head"), "w8a16_channel: --lm-head w8a16_channel");
  EXPECT_EQ(decided(rules, "a.mlp.down_proj"), "w8a8_int8: --rule re:.*=w8a8_int8");
  EXPECT_TRUE(rules.check_all_used().ok());
  options.ignore = {"*head"};
  RuleSet both = RuleSet::create(options, config_of("{}")).value();
  EXPECT_THAT(both.decide("lm_head").status().message(), HasSubstr("--ignore *head"));
}

TEST(RuleSet, NamesPatternsWithoutUse) {
  RuleOptions options = options_for();
  options.rules = {"a=keep", "b=keep"};
  RuleSet rules = RuleSet::create(options, config_of("{}")).value();
  ASSERT_TRUE(rules.decide("a").ok());
  EXPECT_THAT(rules.check_all_used().message(), HasSubstr("--rule b=keep"));
}

TEST(RuleSet, RefusesAModuleThatIsIgnoredAndIncluded) {
  RuleOptions options = options_for();
  options.ignore = {"x.*"};
  options.include = {"*.y"};
  RuleSet rules = RuleSet::create(options, config_of("{}")).value();
  EXPECT_EQ(rules.decide("x.y").status().code(), StatusCode::kInvalidArgument);
}

TEST(RuleSet, ReadsRulesFromAFile) {
  RuleOptions options = options_for();
  options.rules_file = testing::TempDir() + "/rules.txt";
  std::ofstream(options.rules_file) << "# first\r\n\n  *.q = w4a8\t\r\nre:a=b.*=keep";
  RuleSet rules = RuleSet::create(options, config_of("{}")).value();
  EXPECT_EQ(decided(rules, "x.q"), "w4a8: --rules rules.txt:3: *.q = w4a8");
  EXPECT_EQ(decided(rules, "a=bc"), "keep: --rules rules.txt:4: re:a=b.*=keep");
  std::ofstream(options.rules_file) << "\n*.q";
  EXPECT_THAT(RuleSet::create(options, config_of("{}")).status().message(),
              HasSubstr("rules.txt:2"));
}

TEST(RuleSet, KnowsModels) {
  const std::string expert = "model.layers.3.mlp.experts.1.up_proj";
  const std::string dense = "model.layers.3.self_attn.o_proj";
  for (const char* text :
       {R"({"model_type": "kimi_k2"})", R"({"model_type": "gpt_oss"})",
        R"({"model_type": "kimi_k25"})", R"({"architectures": ["DeepseekV3ForCausalLM"]})",
        R"({"text_config": {"model_type": "deepseek_v3"}})"}) {
    RuleSet rules = RuleSet::create(options_for(), config_of(text)).value();
    EXPECT_TRUE(rules.decide(expert)->scheme.has_value()) << text;
    EXPECT_FALSE(rules.decide(dense)->scheme.has_value()) << text;
  }
  RuleSet fp8 =
      RuleSet::create(options_for("w8a8_fp8"), config_of(R"({"model_type": "deepseek_v3"})"))
          .value();
  EXPECT_TRUE(fp8.decide(dense)->scheme.has_value());
  RuleSet other = RuleSet::create(options_for(), config_of(R"({"model_type": "qwen3"})")).value();
  EXPECT_TRUE(other.decide(dense)->scheme.has_value());
}

TEST(RuleSet, PlainNumbersAreForEverything) {
  RuleSet rules =
      RuleSet::create(options_for("bf16"), config_of(R"({"model_type": "kimi_k2"})")).value();
  EXPECT_TRUE(rules.decide("lm_head")->scheme.has_value());
}

}  // namespace
}  // namespace nibble
