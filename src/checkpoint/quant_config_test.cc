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
  return read_quant_config(json.value(), "");
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
  EXPECT_EQ(scheme_of(*group).name, "w4a16_g32");
  EXPECT_TRUE(config->ignores("model.layers.3.self_attn.q_proj"));
  EXPECT_TRUE(config->ignores("model.layers.3.mlp.gate"));
  EXPECT_FALSE(config->ignores("model.layers.3.mlp.gate_proj"));
  EXPECT_FALSE(config->ignores("x.lm_head"));
}

TEST(QuantConfigTest, FindsNestedConfigAndNone) {
  EXPECT_TRUE(read_quant_config(Json::parse("{}").value(), "").value().groups.empty());
  const Json nested = Json::object(
      {{"text_config", Json::object({{"quantization_config",
                                      quant_config_json(find_scheme("w8a8_fp8").value(), {})}})}});
  EXPECT_EQ(read_quant_config(nested, "").value().groups.size(), 1U);
}

TEST(QuantConfigTest, EverySchemeSurvivesWritingAndReading) {
  for (const QuantScheme& scheme : all_schemes()) {
    if (!scheme.weight.quantized()) {
      continue;
    }
    const auto config = parse(quant_config_json(scheme, {"lm_head"}).dump());
    ASSERT_TRUE(config.ok()) << config.status().message();
    // Precisions of blocks are not in the config: without them the weights alone are quantized.
    const bool blocks = in_blocks(scheme.act);
    EXPECT_EQ(scheme_of(config->groups[0]).name,
              blocks ? scheme_name(scheme.weight, ActFormat::kFloat) : scheme.name);
    EXPECT_EQ(config->ignore, std::vector<std::string>{"lm_head"});
  }
}

TEST(QuantConfigTest, ExactTargetsComeBeforeTheClass) {
  const auto config = parse(
      R"({"quant_method":"compressed-tensors","config_groups":{)"
      R"("a":{"targets":["Linear"],"weights":{"num_bits":4,"strategy":"channel"}},)"
      R"("b":{"targets":["re:.*down_proj"],"weights":{"num_bits":8,"strategy":"channel"}}}})");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->group_for("l.0.down_proj")->bits, 8);
  EXPECT_EQ(config->group_for("l.0.up_proj")->bits, 4);
}

TEST(QuantConfigTest, RefusalsNameTheField) {
  const std::string channel4 = R"({"num_bits":4,"strategy":"channel"})";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"7", "quantization_config: not a JSON object"},
      {"{}", "quant_method"},
      {R"({"quant_method":"hqq"})", "\"hqq\" is not read"},
      {R"({"quant_method":"gptq","bits":3})", "field bits"},
      {R"({"quant_method":"awq","bits":4,"version":"gemv"})", "field version"},
      {R"({"quant_method":"fp8","weight_block_size":[128]})", "weight_block_size"},
      {R"({"quant_method":"quark","global_quant_config":{"weight":{"dtype":"int2"}}})", "int2"},
      {R"({"quant_method":"compressed-tensors"})", "config_groups"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"surprise":1})",
       "unknown field \"surprise\""},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"format":"marlin-24"})",
       "marlin-24"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"ignore":["re:("]})", "ignore"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"ignore":[1]})", "ignore"},
      {with_group(R"({"num_bits":3})"), "3-bit codes"},
      {with_group(R"({"num_bits":4,"type":"float","symmetric":false})"), "symmetric"},
      {with_group(R"({"num_bits":4,"strategy":"block","block_structure":[128]})"),
       "block_structure"},
      {with_group(R"({"num_bits":4,"strategy":"row"})"), "strategy"},
      {with_group(R"({"num_bits":4,"strategy":"group","group_size":0})"), "group_size"},
      {with_group(R"({"num_bits":4,"dynamic":true})"), "dynamic"},
      {with_group(R"({"num_bits":4,"new_thing":1})"), "unknown field \"new_thing\""},
      {with_group(R"({"num_bits":"4"})"), "num_bits"},
      {with_group(channel4, R"(,"input_activations":{"new_thing":8})"), "input_activations"},
      {with_group(channel4, R"(,"extra":1)"), "unknown field \"extra\""},
  };
  for (const auto& [text, complaint] : cases) {
    const auto config = parse(text);
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_THAT(config.status().message(), HasSubstr(complaint)) << text;
    EXPECT_THAT(config.status().message(), HasSubstr("config.json")) << text;
  }
}

TEST(QuantConfigTest, ActivationsAreWhatTheConfigSays) {
  using Scale = StoredActivations::Scale;
  struct Case {
    std::string text;
    ActFormat format;
    Scale scale = Scale::kDynamic;
    std::string unknown = {};  // what no product computes
    std::string dropped = {};
  };
  const std::string int8 = R"({"num_bits":8,"strategy":"channel"})";
  const std::string fp8 = R"({"num_bits":8,"type":"float","strategy":"channel"})";
  const auto inputs = [](const std::string& weights, const std::string& fields) {
    return with_group(weights, R"(,"input_activations":{)" + fields + "}");
  };
  const std::string quark_fp8 = R"({"quant_method":"quark","global_quant_config":{"weight":)"
                                R"({"dtype":"fp8_e4m3"},"input_tensors":{"dtype":"fp8_e4m3")";
  const std::string mxfp4 = R"({"num_bits":4,"type":"float","strategy":"group","group_size":32})";
  const std::string quark_mxfp4 = R"({"quant_method":"quark","global_quant_config":{"weight":)"
                                  R"({"dtype":"fp4","qscheme":"per_group","group_size":32,)"
                                  R"("scale_format":"e8m0"},"input_tensors":)";
  const std::vector<Case> cases = {
      {with_group(int8), ActFormat::kFloat},
      {inputs(int8, R"("num_bits":8,"strategy":"token","dynamic":true)"), ActFormat::kInt8Token},
      {inputs(int8, R"("num_bits":8,"strategy":"tensor")"), ActFormat::kInt8Token, Scale::kStatic},
      {inputs(fp8, R"("num_bits":8,"type":"float","strategy":"tensor","dynamic":true)"),
       ActFormat::kFp8Token},
      {inputs(fp8, R"("type":"float","strategy":"group","group_size":128,"dynamic":true)"),
       ActFormat::kFp8Group},
      {inputs(fp8, R"("num_bits":8,"type":"float","strategy":"tensor")"), ActFormat::kFp8Token,
       Scale::kStatic},
      {R"({"quant_method":"fp8"})", ActFormat::kFp8Token},
      {R"({"quant_method":"fp8","activation_scheme":"static"})", ActFormat::kFp8Token,
       Scale::kStatic},
      {R"({"quant_method":"fp8","weight_block_size":[128,128]})", ActFormat::kFp8Group},
      {R"({"quant_method":"modelopt","quant_algo":"FP8"})", ActFormat::kFp8Token, Scale::kStatic},
      {inputs(mxfp4, R"("num_bits":8,"type":"float","strategy":"token","dynamic":true)"),
       ActFormat::kFp8Token},
      {inputs(mxfp4, R"("num_bits":8,"type":"float","strategy":"tensor","dynamic":false)"),
       ActFormat::kFp8Token, Scale::kStatic},
      {inputs(mxfp4, R"("num_bits":4,"type":"float","strategy":"group","dynamic":true)"),
       ActFormat::kFloat, Scale::kDynamic, "", "4-bit floats"},
      {quark_mxfp4 + R"({"dtype":"fp8_e4m3","qscheme":"per_channel","is_dynamic":true}}})",
       ActFormat::kFp8Token},
      {quark_mxfp4 + R"({"dtype":"fp8_e4m3","qscheme":"per_tensor"}}})", ActFormat::kFp8Token,
       Scale::kStatic},
      {quark_fp8 + "}}}", ActFormat::kFp8Token, Scale::kStatic},
      {quark_fp8 + R"(,"is_dynamic":true}}})", ActFormat::kFp8Token},
      {R"({"quant_method":"gptq","bits":4})", ActFormat::kFloat},
      {R"({"quant_method":"modelopt","quant_algo":"NVFP4"})", ActFormat::kFloat, Scale::kDynamic,
       "", "4-bit floats"},
      {inputs(int8, R"("num_bits":8,"strategy":"token","dynamic":true,"symmetric":false)"),
       ActFormat::kFloat, Scale::kDynamic, "zero points"},
      {inputs(int8, R"("num_bits":4,"strategy":"token","dynamic":true)"), ActFormat::kFloat,
       Scale::kDynamic, "4-bit int"},
      {inputs(int8, R"("num_bits":8,"strategy":"channel","dynamic":true)"), ActFormat::kFloat,
       Scale::kDynamic, "\"channel\""},
      {with_group(int8, R"(,"output_activations":{"num_bits":8})"), ActFormat::kFloat,
       Scale::kDynamic, "output_activations"},
      {R"({"quant_method":"fp8","weight_block_size":[128,64]})", ActFormat::kFp8Group,
       Scale::kDynamic, "blocks"},
  };
  for (const Case& each : cases) {
    const auto config = parse(each.text);
    ASSERT_TRUE(config.ok()) << each.text << config.status().message();
    const StoredActivations& found = config->groups.front().activations;
    EXPECT_EQ(found.unknown.empty(), each.unknown.empty()) << each.text << found.unknown;
    EXPECT_THAT(found.unknown, HasSubstr(each.unknown)) << each.text;
    EXPECT_EQ(found.dropped.empty(), each.dropped.empty()) << each.text;
    EXPECT_THAT(found.dropped, HasSubstr(each.dropped)) << each.text;
    if (each.unknown.empty()) {
      EXPECT_EQ(found.format, each.format) << each.text;
      EXPECT_EQ(found.scale, each.scale) << each.text;
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
