#include "arch/config.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "model/rope_frequencies.h"

namespace nibble {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// A small config.json of one architecture, with members added or replaced.
std::string config_text(const std::string& architecture,
                        const std::vector<std::pair<std::string, std::string>>& members = {}) {
  Json json = Json::parse(R"({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
      "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
      "max_position_embeddings": 128, "rms_norm_eps": 1e-5})")
                  .value();
  json.set("architectures", JsonArray{Json(architecture)});
  for (const auto& [key, text] : members) {
    json.set(key, Json::parse(text).value());
  }
  return json.dump();
}

TEST(ModelConfigTest, ReadsTextAndGenerationDefaults) {
  const std::string text = config_text("LlamaForCausalLM", {{"eos_token_id", "3"}});
  const auto plain = parse_model_config({.text = text});
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_EQ(plain->num_kv_heads, 2);
  EXPECT_THAT(plain->eos_token_ids, ElementsAre(3));
  EXPECT_LT(plain->default_temperature, 0);
  const auto full = parse_model_config(
      {.text = text, .generation_text = R"({"eos_token_id": [5, 6], "temperature": 0.5})"});
  ASSERT_TRUE(full.ok()) << full.status().message();
  EXPECT_THAT(full->eos_token_ids, ElementsAre(5, 6));
  EXPECT_EQ(full->default_temperature, 0.5);
}

TEST(ModelConfigTest, RefusalsNameFileAndField) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "config.json: expected a JSON object"},
      {"{", "config.json: JSON"},
      {"{}", "field architectures"},
      {config_text("NoSuchModel"), "NoSuchModel"},
      {config_text("LlamaForCausalLM", {{"num_hidden_layers", "0"}}), "num_hidden_layers: 0"},
      {config_text("LlamaForCausalLM", {{"num_key_value_heads", "3"}}), "num_key_value_heads: 3"},
      {config_text("LlamaForCausalLM", {{"eos_token_id", "64"}}), "eos_token_id"},
  };
  for (const auto& [text, message] : cases) {
    const auto config = parse_model_config({.text = text});
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_THAT(config.status().message(), HasSubstr(message));
  }
}

/// OPT's config.json, with members added or replaced.
std::string opt_text(const std::vector<std::pair<std::string, std::string>>& members = {}) {
  std::vector<std::pair<std::string, std::string>> all = {{"model_type", R"("opt")"},
                                                          {"ffn_dim", "96"},
                                                          {"intermediate_size", "null"},
                                                          {"num_key_value_heads", "null"}};
  all.insert(all.end(), members.begin(), members.end());
  return config_text("OPTForCausalLM", all);
}

TEST(ModelConfigTest, OptNamesItsOwnFields) {
  const auto config = parse_model_config({.text = opt_text()});
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->intermediate_size, 96);
  EXPECT_EQ(config->num_kv_heads, 4);
  EXPECT_EQ(config->norm, NormKind::kLayer);
  EXPECT_EQ(config->norm_eps, 1e-5);
  EXPECT_EQ(config->activation, GemmInput::Kind::kRelu);
  EXPECT_TRUE(config->learned_positions);
  EXPECT_EQ(config->first_position, 2);
  EXPECT_TRUE(config->tie_word_embeddings && config->qkv_bias && config->output_bias);
  for (const float frequency : compute_rope_frequencies(config->rope, 8).inv_freq) {
    EXPECT_EQ(frequency, 0.0F);
  }
  const auto plain = parse_model_config(
      {.text = opt_text({{"enable_bias", "false"}, {"tie_word_embeddings", "false"}})});
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  EXPECT_FALSE(plain->qkv_bias || plain->output_bias || plain->mlp_bias);
  EXPECT_FALSE(plain->tie_word_embeddings);
}

TEST(ModelConfigTest, Starcoder2NamesItsOwnFields) {
  const std::vector<std::pair<std::string, std::string>> members = {
      {"model_type", R"("starcoder2")"},
      {"hidden_act", R"("gelu_pytorch_tanh")"},
      {"norm_epsilon", "2e-5"},
      {"sliding_window", "7"}};
  const auto config = parse_model_config({.text = config_text("Starcoder2ForCausalLM", members)});
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->norm, NormKind::kLayer);
  EXPECT_EQ(config->norm_eps, 2e-5);
  EXPECT_EQ(config->activation, GemmInput::Kind::kGeluTanh);
  EXPECT_TRUE(config->tie_word_embeddings && config->qkv_bias && config->output_bias);
  EXPECT_TRUE(config->mlp_bias);
  for (const int64_t window : config->sliding_windows) {
    EXPECT_EQ(window, 7);
  }
  auto plain = members;
  plain.insert(plain.end(), {{"use_bias", "false"}, {"sliding_window", "null"}});
  const auto other = parse_model_config({.text = config_text("Starcoder2ForCausalLM", plain)});
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_FALSE(other->qkv_bias || other->output_bias || other->mlp_bias);
  EXPECT_EQ(other->sliding_windows.front(), 0);
  plain.emplace_back("hidden_act", R"("gelu")");
  const auto exact = parse_model_config({.text = config_text("Starcoder2ForCausalLM", plain)});
  ASSERT_FALSE(exact.ok());
  EXPECT_THAT(exact.status().message(), HasSubstr("only \"gelu_pytorch_tanh\""));
}

TEST(ModelConfigTest, RefusesWhatOptModelsDoOtherwise) {
  const std::vector<std::pair<std::string, std::string>> members = {
      {"do_layer_norm_before", "false"},    {"_remove_final_layer_norm", "true"},
      {"word_embed_proj_dim", "16"},        {"layer_norm_elementwise_affine", "false"},
      {"activation_function", R"("gelu")"},
  };
  for (const auto& member : members) {
    const auto config = parse_model_config({.text = opt_text({member})});
    ASSERT_FALSE(config.ok()) << member.first;
    EXPECT_EQ(config.status().code(), StatusCode::kUnsupported);
    EXPECT_THAT(config.status().message(), HasSubstr("field " + member.first));
  }
  for (const auto& [member, message] : std::vector<std::pair<std::string, std::string>>{
           {"ffn_dim", "ffn_dim: 0"}, {"num_attention_heads", "num_attention_heads: 0"}}) {
    const auto config = parse_model_config({.text = opt_text({{member, "0"}})});
    ASSERT_FALSE(config.ok()) << member;
    EXPECT_THAT(config.status().message(), HasSubstr(message));
  }
}

TEST(ModelConfigTest, TypesByName) {
  using Members = std::vector<std::pair<std::string, std::string>>;
  const std::vector<std::pair<Members, DType>> cases = {
      {{}, DType::kF32},
      {{{"dtype", "null"}}, DType::kF32},
      {{{"dtype", R"("bfloat16")"}}, DType::kBF16},
      {{{"torch_dtype", R"("float16")"}}, DType::kF16},
      {{{"dtype", R"("float32")"}, {"torch_dtype", R"("bfloat16")"}}, DType::kF32},
      {{{"dtype", "null"}, {"torch_dtype", R"("torch.bfloat16")"}}, DType::kBF16},
  };
  for (const auto& [members, type] : cases) {
    const auto config = parse_model_config({.text = config_text("LlamaForCausalLM", members)});
    ASSERT_TRUE(config.ok()) << config.status().message();
    EXPECT_EQ(config->dtype, type);
  }
  for (const char* key : {"dtype", "torch_dtype"}) {
    for (const char* value : {R"("bfloat17")", R"("auto")", R"("")", "3", R"(["bf16"])"}) {
      const auto config =
          parse_model_config({.text = config_text("LlamaForCausalLM", {{key, value}})});
      ASSERT_FALSE(config.ok()) << value;
      EXPECT_EQ(config.status().code(),
                *value == '"' ? StatusCode::kUnsupported : StatusCode::kCorrupt);
      EXPECT_THAT(config.status().message(),
                  HasSubstr(std::string("field ") + key + ": " + value + " is no type"));
    }
  }
}

// A few bytes of text must not ask for gigabytes before any weight is looked at.
TEST(ModelConfigTest, LyingSizesAreRefusedBeforeTheyAllocate) {
  for (const char* key : {"num_hidden_layers", "num_attention_heads", "head_dim"}) {
    const std::string text = config_text("MistralForCausalLM", {{key, "2147483646"}});
    const auto config = parse_model_config({.text = text});
    ASSERT_FALSE(config.ok()) << key;
    EXPECT_THAT(config.status().message(), HasSubstr(std::string(key) + ": 2147483646"));
  }
}

TEST(ModelConfigTest, DynamicScalingMultipliesThePositions) {
  const std::vector<std::pair<std::string, int64_t>> cases = {
      {"1", 128}, {"2.5", 320}, {"0.5", 128}, {"1000000", 128000000}};
  for (const auto& [factor, positions] : cases) {
    const std::string rope = R"({"rope_type": "dynamic", "factor": )" + factor + "}";
    const auto config =
        parse_model_config({.text = config_text("LlamaForCausalLM", {{"rope_scaling", rope}})});
    ASSERT_TRUE(config.ok()) << config.status().message();
    EXPECT_EQ(config->max_position, positions);
    EXPECT_THAT(std::string(positions_name(*config)), HasSubstr("factor"));
    const DynamicRope dynamic = compute_rope_frequencies(config->rope, config->head_dim).dynamic;
    EXPECT_EQ(dynamic.original, 128);
    EXPECT_EQ(dynamic.factor, std::stod(factor));
  }
  const auto largest = parse_model_config(
      {.text = config_text("LlamaForCausalLM",
                           {{"max_position_embeddings", "2147483647"},
                            {"rope_scaling", R"({"rope_type": "dynamic", "factor": 8})"}})});
  ASSERT_TRUE(largest.ok()) << largest.status().message();
  EXPECT_EQ(largest->max_position, 2147483647);
  const auto plain = parse_model_config({.text = config_text("LlamaForCausalLM")});
  EXPECT_EQ(positions_name(*plain), "max_position_embeddings");
  EXPECT_EQ(compute_rope_frequencies(plain->rope, plain->head_dim).dynamic.original, 0);
}

TEST(ModelConfigTest, RotationsThatWouldNotBeFiniteAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"rope_theta": 1e-300})", "rope_theta"},
      {R"({"rope_type": "yarn", "factor": 4, "rope_theta": 1})", "rope_theta"},
      {R"({"rope_type": "linear", "factor": 1e-300})", "factor"},
      {R"({"rope_type": "yarn", "factor": 4, "beta_fast": 1e-320})", "beta_fast"},
      {R"({"rope_type": "yarn", "factor": 4, "mscale": 1e308, "mscale_all_dim": 1e-9})", "mscale"},
  };
  for (const auto& [rope, field] : cases) {
    const std::string text = config_text("LlamaForCausalLM", {{"rope_scaling", rope}});
    const auto config = parse_model_config({.text = text});
    ASSERT_FALSE(config.ok()) << rope;
    EXPECT_THAT(config.status().message(), HasSubstr(field));
  }
  const std::string good =
      config_text("LlamaForCausalLM", {{"rope_scaling", R"({"rope_type": "yarn", "factor": 4})"}});
  const auto config = parse_model_config({.text = good});
  ASSERT_TRUE(config.ok()) << config.status().message();
  for (const float frequency : compute_rope_frequencies(config->rope, config->head_dim).inv_freq) {
    EXPECT_TRUE(std::isfinite(frequency));
  }
}

}  // namespace
}  // namespace nibble
