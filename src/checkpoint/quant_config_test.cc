#include "checkpoint/quant_config.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::HasSubstr;

Result<QuantConfig> parse(const std::string& quantization_config) {
  const auto json = Json::parse(R"({"quantization_config":)" + quantization_config + "}");
  return parse_quant_config(json.value(), "config.json");
}

std::string with_group(const std::string& weights, const std::string& rest = "") {
  return R"({"quant_method":"compressed-tensors","config_groups":{"group_0":{"targets":["Linear"],)"
         R"("weights":)" +
         weights + rest + "}}}";
}

TEST(QuantConfigTest, ReadsTheKimiStyleConfig) {
  const auto config = parse(
      R"({"quant_method":"compressed-tensors","format":"pack-quantized",)"
      R"("quantization_status":"compressed","kv_cache_scheme":null,"config_groups":{"group_0":)"
      R"({"targets":["Linear"],"input_activations":null,"output_activations":null,"weights":)"
      R"({"num_bits":4,"type":"int","symmetric":true,"strategy":"group","group_size":32,)"
      R"("dynamic":false,"actorder":null}}},)"
      R"("ignore":["lm_head","re:.*self_attn.*","re:.*mlp\\.gate$"]})");
  ASSERT_TRUE(config.ok()) << config.status().message();
  const QuantGroup* group = config->group_for("model.layers.1.mlp.experts.0.up_proj");
  ASSERT_NE(group, nullptr);
  EXPECT_EQ(group->weight.code, WeightCode::kInt4);
  EXPECT_EQ(group->weight.group_size, 32);
  EXPECT_TRUE(config->ignores("model.layers.3.self_attn.q_proj"));
  EXPECT_TRUE(config->ignores("model.layers.3.mlp.gate"));
  EXPECT_FALSE(config->ignores("model.layers.3.mlp.gate_proj"));
  EXPECT_FALSE(config->ignores("x.lm_head"));
}

TEST(QuantConfigTest, FindsNestedConfigAndNone) {
  EXPECT_TRUE(parse_quant_config(Json::parse("{}").value(), "c").value().groups.empty());
  const Json nested = Json::object(
      {{"text_config", Json::object({{"quantization_config",
                                      quant_config_json(find_scheme("w8a8_fp8").value(), {})}})}});
  EXPECT_EQ(parse_quant_config(nested, "c").value().groups.size(), 1U);
}

TEST(QuantConfigTest, EverySchemeSurvivesWritingAndReading) {
  for (const QuantScheme& scheme : all_schemes()) {
    if (!scheme.weight.quantized()) {
      continue;
    }
    const auto config = parse(quant_config_json(scheme, {"lm_head"}).dump());
    if (!config.ok() && config.status().code() == StatusCode::kUnsupported) {
      continue;  // not read for running; what is written is tested beside the writer
    }
    ASSERT_TRUE(config.ok()) << config.status().message();
    if (scheme.weight.scale_per != ScalePer::kTensor) {  // repeated per channel when read
      EXPECT_EQ(scheme_name(config->groups[0].weight, config->groups[0].act), scheme.name);
    }
    EXPECT_EQ(config->ignore, std::vector<std::string>{"lm_head"});
  }
}

TEST(QuantConfigTest, ExactTargetsComeBeforeTheClass) {
  const auto config = parse(
      R"({"quant_method":"compressed-tensors","config_groups":{)"
      R"("a":{"targets":["Linear"],"weights":{"num_bits":4,"strategy":"channel"}},)"
      R"("b":{"targets":["re:.*down_proj"],"weights":{"num_bits":8,"strategy":"channel"}}}})");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->group_for("l.0.down_proj")->weight.code, WeightCode::kInt8);
  EXPECT_EQ(config->group_for("l.0.up_proj")->weight.code, WeightCode::kInt4);
}

TEST(QuantConfigTest, RefusalsNameTheField) {
  const std::string channel4 = R"({"num_bits":4,"strategy":"channel"})";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"7", "quantization_config: not a JSON object"},
      {"{}", "quant_method"},
      {R"({"quant_method":"hqq"})", "\"hqq\" is not read"},
      {R"({"quant_method":"gptq","bits":4,"sym":false})", "sym: false"},
      {R"({"quant_method":"gptq","bits":3})", "field bits"},
      {R"({"quant_method":"awq","bits":4})", "nibble quantize"},
      {R"({"quant_method":"mxfp4"})", "cannot be run"},
      {R"({"quant_method":"fp8","weight_block_size":[128,128]})", "weight_block_size"},
      {R"({"quant_method":"fp8","activation_scheme":"static"})", "activation_scheme"},
      {R"({"quant_method":"quark","global_quant_config":{"weight":{"dtype":"int8"}}})",
       "INT4 over FP8"},
      {R"({"quant_method":"compressed-tensors"})", "config_groups"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"surprise":1})",
       "unknown field \"surprise\""},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"format":"nvfp4-pack-quantized"})",
       "nvfp4-pack-quantized"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"ignore":["re:("]})", "ignore"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"ignore":[1]})", "ignore"},
      {with_group("null"), "config_groups.group_0: field weights"},
      {with_group(R"({"num_bits":3})"), "3-bit int"},
      {with_group(R"({"num_bits":4,"type":"float"})"), "4-bit float"},
      {with_group(R"({"num_bits":4,"strategy":"block","block_structure":[128,128]})"),
       "block_structure"},
      {with_group(R"({"num_bits":4,"strategy":"row"})"), "strategy"},
      {with_group(R"({"num_bits":4,"strategy":"group","group_size":0})"), "group_size"},
      {with_group(R"({"num_bits":4,"symmetric":false})"), "symmetric"},
      {with_group(R"({"num_bits":4,"actorder":"group"})"), "actorder"},
      {with_group(R"({"num_bits":4,"dynamic":true})"), "dynamic"},
      {with_group(R"({"num_bits":4,"new_thing":1})"), "unknown field \"new_thing\""},
      {with_group(R"({"num_bits":"4"})"), "num_bits"},
      {with_group(channel4, R"(,"input_activations":{"num_bits":8,"strategy":"tensor"})"),
       "input_activations"},
      {with_group(channel4, R"(,"output_activations":{"num_bits":8})"), "output_activations"},
      {with_group(channel4, R"(,"extra":1)"), "unknown field \"extra\""},
      {with_group(R"({"num_bits":4,"strategy":"group","group_size":32})",
                  R"(,"input_activations":{"num_bits":8,"strategy":"token","dynamic":true})"),
       "one scale per channel"},
  };
  for (const auto& [text, complaint] : cases) {
    const auto config = parse(text);
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_THAT(config.status().message(), HasSubstr(complaint)) << text;
    EXPECT_THAT(config.status().message(), HasSubstr("config.json")) << text;
    if (config.status().code() == StatusCode::kUnsupported && text.find("hqq") == text.npos) {
      EXPECT_THAT(config.status().message(),
                  testing::AnyOf(HasSubstr("nibble quantize SRC DST"), HasSubstr("field bits")))
          << text;
    }
  }
}

TEST(MatchesModule, IsAnchoredAtTheStartOnly) {
  EXPECT_TRUE(matches_module("re:model", "model.layers").value());
  EXPECT_FALSE(matches_module("re:layers", "model.layers").value());
  EXPECT_TRUE(matches_module("re:.*gate$", "mlp.gate").value());
  EXPECT_FALSE(matches_module("model", "model.layers").value());
  EXPECT_FALSE(matches_module("re:(", "x").ok());
  // Exponential backtracking ends at the step limit.
  EXPECT_FALSE(matches_module("re:(a|aa)+$", std::string(64, 'a') + "b").ok());
}

}  // namespace
}  // namespace nibble
