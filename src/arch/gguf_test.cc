#include "arch/gguf.h"

#include <cmath>
#include <filesystem>
#include <numbers>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "gguf/testing/gguf_builder.h"

namespace nibble {
namespace {

using gguf::GgufBuilder;
using testing::HasSubstr;

constexpr int64_t kHeadDim = 64;

// Without what says how far positions reach and turn.
GgufBuilder decoder(const std::string& architecture, uint32_t layers) {
  GgufBuilder builder;
  builder.add("general.architecture", architecture);
  const auto add = [&](std::string_view name, auto value) {
    builder.add(architecture + "." + std::string(name), value);
  };
  add("block_count", layers);
  add("embedding_length", uint32_t{256});
  add("feed_forward_length", uint32_t{512});
  add("attention.head_count", uint32_t{4});
  add("attention.head_count_kv", uint32_t{2});
  add("attention.layer_norm_rms_epsilon", 1e-5F);
  builder.add_floats("token_embd.weight", {3, 256}, std::vector<float>(3 * 256));
  return builder;
}

GgufBuilder llama(uint32_t layers = 2) {
  GgufBuilder builder = decoder("llama", layers);
  builder.add("llama.context_length", uint32_t{4096}).add("llama.rope.freq_base", 500000.0F);
  return builder;
}

class GgufConfig : public testing::Test {
 protected:
  Result<Json> read(const GgufBuilder& builder) {
    const auto path = std::filesystem::temp_directory_path() /
                      ("nibble_gguf_config_" + std::to_string(::getpid()) + ".gguf");
    builder.write(path);
    auto files = gguf::FileSet::open(path);
    std::filesystem::remove(path);
    return files.ok() ? gguf_config(*files) : files.status();
  }

  Json config(const GgufBuilder& builder) {
    auto json = read(builder);
    EXPECT_TRUE(json.ok()) << json.status().message();
    return json.ok() ? *json : Json();
  }
};

TEST_F(GgufConfig, SaysWhatTheMetadataSays) {
  const Json json = config(llama());
  const ModelConfig parsed = parse_model_config({.text = json.dump()}).value();
  EXPECT_EQ(parsed.num_layers, 2);
  EXPECT_EQ(parsed.num_heads, 4);
  EXPECT_EQ(parsed.num_kv_heads, 2);
  EXPECT_EQ(parsed.head_dim, kHeadDim);
  EXPECT_EQ(parsed.vocab_size, 3);
  EXPECT_EQ(parsed.norm_eps, 1e-5);  // as it was written, not as F32 holds it
  EXPECT_EQ(parsed.rope.theta, 500000.0);
  EXPECT_TRUE(parsed.tie_word_embeddings);
  EXPECT_EQ(parsed.dtype, DType::kF32);
}

TEST_F(GgufConfig, AHeadOfItsOwnIsNotTied) {
  GgufBuilder builder = llama();
  builder.add_floats("output.weight", {3, 256}, std::vector<float>(3 * 256));
  EXPECT_FALSE(config(builder).find("tie_word_embeddings")->as_bool());
}

std::vector<float> llama3_factors(double factor) {
  std::vector<float> factors;
  for (int64_t i = 0; i < kHeadDim / 2; ++i) {
    const double length =
        2 * std::numbers::pi * std::pow(500000.0, 2.0 * static_cast<double>(i) / double{kHeadDim});
    const double smooth = (8192 / length - 1) / 3;
    factors.push_back(static_cast<float>(length < 8192.0 / 4 ? 1.0
                                         : length > 8192.0   ? factor
                                                           : 1 / ((1 - smooth) / factor + smooth)));
  }
  return factors;
}

TEST_F(GgufConfig, FactorsOfLlama3AreKnownAgain) {
  for (const double factor : {8.0, 32.0}) {
    GgufBuilder builder = llama();
    builder.add_floats("rope_freqs.weight", {kHeadDim / 2}, llama3_factors(factor));
    const Json json = config(builder);
    const ModelConfig parsed = parse_model_config({.text = json.dump()}).value();
    EXPECT_EQ(parsed.rope.kind, RopeKind::kLlama3);
    EXPECT_EQ(parsed.rope.factor, factor);
    EXPECT_EQ(parsed.rope.original_max_position, 8192);
  }
  std::vector<float> other = llama3_factors(8.0);
  other[20] *= 1.01F;
  GgufBuilder builder = llama();
  builder.add_floats("rope_freqs.weight", {kHeadDim / 2}, other);
  EXPECT_THAT(read(builder).status().message(), HasSubstr("rope_freqs.weight: number 20"));
}

TEST_F(GgufConfig, YarnAndLinearAreReadOthersRefused) {
  GgufBuilder yarn = llama();
  yarn.add("llama.rope.scaling.type", "yarn").add("llama.rope.scaling.factor", 4.0F);
  yarn.add("llama.rope.scaling.original_context_length", uint32_t{1024});
  const ModelConfig parsed = parse_model_config({.text = config(yarn).dump()}).value();
  EXPECT_EQ(parsed.rope.kind, RopeKind::kYarn);
  EXPECT_EQ(parsed.rope.original_max_position, 1024);
  GgufBuilder linear = llama();
  linear.add("llama.rope.scaling.type", "linear").add("llama.rope.scaling.factor", 2.0F);
  EXPECT_EQ(parse_model_config({.text = config(linear).dump()})->rope.kind, RopeKind::kLinear);
  GgufBuilder other = llama();
  other.add("llama.rope.scaling.type", "longrope");
  EXPECT_EQ(read(other).status().code(), StatusCode::kUnsupported);
}

TEST_F(GgufConfig, RefusesWhatItWouldComputeOtherwise) {
  const auto refused = [&](const GgufBuilder& builder, std::string_view word) {
    const Status status = read(builder).status();
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(word));
  };
  GgufBuilder experts = llama();
  const Status unsaid = read(experts.add("llama.expert_count", uint32_t{8})).status();
  EXPECT_THAT(unsaid.message(), HasSubstr("llama.expert_used_count"));
  experts.add("llama.expert_used_count", uint32_t{2});
  EXPECT_EQ(config(experts).find("model_type")->as_string(), "mixtral");
  EXPECT_EQ(config(experts).find("num_local_experts")->as_int(), 8);
  GgufBuilder window = llama();
  refused(window.add("llama.attention.sliding_window", uint32_t{1024}), "windows");
  GgufBuilder part = llama();
  refused(part.add("llama.rope.dimension_count", uint32_t{32}), "rotated");
  GgufBuilder family;
  refused(family.add("general.architecture", "gemma7"), "llama, qwen2, qwen3");
}

// Each was asked for its router, and those without were listed: minutes and gigabytes.
TEST_F(GgufConfig, RefusesMoreLayersThanTensorsCanName) {
  GgufBuilder builder = llama(2'000'000'000);
  builder.add("llama.expert_count", uint32_t{8}).add("llama.expert_used_count", uint32_t{2});
  const Status status = read(builder).status();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("llama.block_count"));
}

TEST_F(GgufConfig, SaysOfGptOssWhatItsFilesLeaveOut) {
  GgufBuilder builder = decoder("gpt-oss", 2);
  builder.add("gpt-oss.context_length", uint32_t{131072});
  builder.add("gpt-oss.expert_count", uint32_t{8}).add("gpt-oss.expert_used_count", uint32_t{4});
  builder.add("gpt-oss.rope.freq_base", 150000.0F);
  builder.add("gpt-oss.rope.scaling.type", "yarn");
  builder.add("gpt-oss.rope.scaling.factor", 32.0F);
  builder.add("gpt-oss.rope.scaling.original_context_length", uint32_t{4096});
  EXPECT_THAT(read(builder).status().message(), HasSubstr("gpt-oss.attention.sliding_window"));
  GgufBuilder large = builder;
  large.add("gpt-oss.attention.sliding_window", uint32_t{1} << 31);
  EXPECT_EQ(read(large).status().code(), StatusCode::kCorrupt);
  builder.add("gpt-oss.attention.sliding_window", uint32_t{128});
  const ModelConfig parsed = parse_model_config({.text = config(builder).dump()}).value();
  EXPECT_EQ(parsed.sliding_windows, (std::vector<int64_t>{128, 0}));
  EXPECT_EQ(parsed.rope.kind, RopeKind::kYarn);
  EXPECT_FALSE(parsed.rope.truncate);
  EXPECT_EQ(parsed.moe.experts, 8);
  EXPECT_EQ(parsed.moe.experts_per_token, 4);
}

TEST_F(GgufConfig, TensorsHaveTheNamesOfTheirRoles) {
  const std::string bytes = llama().build();
  const auto content = gguf::parse_gguf(std::as_bytes(std::span(bytes)), "m.gguf").value();
  const Family& family = *gguf_family(content.metadata).value();
  const auto named = [&](std::string_view name) {
    return gguf_tensor(family, content.metadata, name);
  };
  EXPECT_EQ(named("blk.1.ffn_gate.weight").value()->name, "model.layers.1.mlp.gate_proj.weight");
  EXPECT_EQ(named("blk.0.attn_q.weight").value()->paired_heads, 4);
  EXPECT_EQ(named("blk.0.attn_k.weight").value()->paired_heads, 2);
  EXPECT_EQ(named("blk.0.attn_v.weight").value()->paired_heads, 0);
  EXPECT_FALSE(named("rope_freqs.weight").value().has_value());
  for (const std::string_view odd : {"blk.0.ssm_a", "blk.x.attn_q.weight", "attn_q.weight",
                                     "blk.0.attn_q", "blk.0.attn_q.scale", ""}) {
    EXPECT_EQ(named(odd).status().code(), StatusCode::kUnsupported) << odd;
  }
}

}  // namespace
}  // namespace nibble
