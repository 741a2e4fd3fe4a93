#include "bench/serving/dummy_weights.h"

#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "quant/codec.h"

namespace nibble {
namespace {

ModelConfig small_config() {
  return parse_model_config({.text = R"({"architectures": ["LlamaForCausalLM"],
      "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
      "vocab_size": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16"})",
                             .path = "config.json"})
      .value();
}

std::vector<float> decoded(const QuantView& view) {
  const QuantTensor tensor = copy_of(view).value();
  std::vector<float> values(static_cast<size_t>(tensor.n * tensor.k));
  for (int64_t row = 0; row < tensor.n; ++row) {
    decode_row(tensor, row, values.data() + row * tensor.k);
  }
  return values;
}

TEST(DummyWeights, AreGaussianInEveryScheme) {
  const ModelConfig config = small_config();
  for (const QuantScheme& scheme : all_schemes()) {
    DummyWeights weights(config, scheme, 3);
    const auto made = weights.linear("model.layers.1.mlp.down_proj", 300, 512);
    ASSERT_TRUE(made.ok()) << scheme.name << made.status().message();
    EXPECT_EQ(made->weight.format.code, scheme.weight.code) << scheme.name;
    EXPECT_EQ(made->act.format, scheme.act) << scheme.name;
    const std::vector<float> values = decoded(made->weight);
    double squares = 0;
    for (const float value : values) {
      squares += static_cast<double>(value) * value;
    }
    EXPECT_NEAR(std::sqrt(squares / static_cast<double>(values.size())), 0.02, 0.001)
        << scheme.name;
    for (size_t i = 0; i < 44 * 512; ++i) {  // rows from 256 on are the first ones again
      ASSERT_EQ(values[256 * 512 + i], values[i]) << scheme.name;
    }
  }
}

TEST(DummyWeights, LeaveWhatQuantizeKeeps) {
  const QuantScheme scheme = find_scheme("w4a16_g128").value();
  DummyWeights weights(small_config(), scheme, 3);
  for (const char* module : {"model.embed_tokens", "lm_head"}) {
    const auto made = weights.linear(module, 512, 256).value();
    EXPECT_EQ(made.weight.format.code, WeightCode::kBf16) << module;
  }
  EXPECT_EQ(weights.numbers("model.norm.weight", {256}).value(), std::vector<float>(256, 1.0F));
  EXPECT_EQ(weights.numbers("model.layers.0.self_attn.q_proj.bias", {4}).value(),
            std::vector<float>(4, 0.0F));
}

TEST(DummyWeights, SayWhichModuleASchemeCannotStore) {
  DummyWeights weights(small_config(), find_scheme("w4a16_g128").value(), 3);
  const Status refused = weights.linear("model.layers.0.mlp.up_proj", 512, 200).status();
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.message().find("model.layers.0.mlp.up_proj"), std::string::npos);
}

}  // namespace
}  // namespace nibble
