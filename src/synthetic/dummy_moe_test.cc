#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/source_matrix.h"
#include "synthetic/dummy.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kInt4 =
    R"({"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"group_0":{)"
    R"("targets":["Linear"],"weights":{"num_bits":4,"type":"int","symmetric":true,)"
    R"("strategy":"group","group_size":32}}},"ignore":["lm_head","re:.*self_attn.*"]})";
constexpr const char* kFp8 = R"({"quant_method":"fp8","fmt":"e4m3","weight_block_size":[128,128]})";

Json deepseek_config(const char* quantization_config) {
  Json json = Json::object({{"architectures", JsonArray{"DeepseekV3ForCausalLM"}},
                            {"hidden_size", 64},
                            {"intermediate_size", 192},
                            {"moe_intermediate_size", 96},
                            {"num_hidden_layers", 3},
                            {"first_k_dense_replace", 1},
                            {"moe_layer_freq", 1},
                            {"n_routed_experts", 4},
                            {"num_experts_per_tok", 2},
                            {"n_shared_experts", 1},
                            {"num_attention_heads", 2},
                            {"max_position_embeddings", 64},
                            {"q_lora_rank", 48},
                            {"kv_lora_rank", 32},
                            {"qk_nope_head_dim", 16},
                            {"qk_rope_head_dim", 8},
                            {"v_head_dim", 16},
                            {"vocab_size", 512},
                            {"bos_token_id", 1},
                            {"eos_token_id", JsonArray{2, 3}},
                            {"torch_dtype", "bfloat16"}});
  json.set("quantization_config", Json::parse(quantization_config).value());
  return json;
}

class DummyMoe : public testing::Test {
 protected:
  void SetUp() override {
    root_ =
        fs::path(testing::TempDir()) /
        (std::string("dummy_moe_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  // Makes a checkpoint and lists its matrices.
  Result<DummyReport> make(const Json& config, DummyOptions options = {}) {
    options.config = (root_ / "in.json").string();
    options.destination = (root_ / "out").string();
    options.existing = ExistingOutput::kReplace;
    std::ofstream(options.config) << config.dump();
    auto report = make_dummy_checkpoint(options);
    if (report.ok()) {
      written_ = Json::parse(read_file(options.destination + "/config.json").value()).value();
      reader_ =
          std::make_unique<CheckpointReader>(CheckpointReader::open(options.destination).value());
      auto model = list_source_matrices(*reader_, written_);
      EXPECT_TRUE(model.ok()) << model.status().message();
      model_ = std::move(model).value();
      by_module_.clear();
      for (const auto& matrix : model_.matrices) {
        by_module_[matrix->module()] = matrix.get();
      }
    }
    return report;
  }

  const SourceMatrix& matrix(const std::string& module,
                             int64_t n,
                             int64_t k,
                             const std::string& format) {
    const SourceMatrix* found = by_module_[module];
    EXPECT_NE(found, nullptr) << module;
    EXPECT_EQ(found->n(), n) << module;
    EXPECT_EQ(found->k(), k) << module;
    EXPECT_EQ(found->format(), format) << module;
    return *found;
  }

  fs::path root_;
  Json written_;
  std::unique_ptr<CheckpointReader> reader_;
  SourceModel model_;
  std::map<std::string, const SourceMatrix*> by_module_;
};

// Deviation and mean of all weights of a matrix, in units of 0.02. Few scales spread the deviation.
void expect_gaussian(const SourceMatrix& matrix, double tolerance = 0.12) {
  std::vector<float> x(static_cast<size_t>(matrix.n() * matrix.k()));
  ASSERT_TRUE(matrix.decode(0, matrix.n(), x.data()).ok());
  double sum = 0;
  double squares = 0;
  for (const float value : x) {
    sum += value / 0.02;
    squares += (value / 0.02) * (value / 0.02);
  }
  const auto count = static_cast<double>(x.size());
  EXPECT_NEAR(sum / count, 0, 0.06) << matrix.module();
  EXPECT_NEAR(std::sqrt(squares / count), 1, tolerance) << matrix.module();
}

TEST_F(DummyMoe, KimiKeepsNestedInt4Experts) {
  Json text = deepseek_config(kInt4);
  text.as_object().erase("architectures");
  const Json config = Json::object(
      {{"architectures", JsonArray{"KimiK25ForConditionalGeneration"}}, {"text_config", text}});
  DummyOptions options;
  options.layers = 2;
  const auto report = make(config, options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(written_.find("quantization_config"), nullptr);
  const Json* kept = written_.find("text_config");
  EXPECT_EQ(kept->find("num_hidden_layers")->as_int(), 2);
  EXPECT_NE(kept->find("quantization_config"), nullptr);
  const std::string prefix = "language_model.model.layers.";
  matrix(prefix + "0.mlp.gate_proj", 192, 64, "BF16");
  matrix(prefix + "0.self_attn.q_a_proj", 48, 64, "BF16");
  matrix(prefix + "0.self_attn.q_b_proj", 48, 48, "BF16");
  matrix(prefix + "0.self_attn.kv_a_proj_with_mqa", 40, 64, "BF16");
  matrix(prefix + "0.self_attn.kv_b_proj", 64, 32, "BF16");
  matrix(prefix + "0.self_attn.o_proj", 64, 32, "BF16");
  matrix(prefix + "1.mlp.gate", 4, 64, "BF16");
  matrix(prefix + "1.mlp.shared_experts.down_proj", 64, 96, "BF16");
  matrix("language_model.model.embed_tokens", 512, 64, "BF16");
  matrix("language_model.lm_head", 512, 64, "BF16");
  expect_gaussian(matrix(prefix + "1.mlp.experts.3.up_proj", 96, 64, "int4 g32"));
  expect_gaussian(matrix(prefix + "1.mlp.experts.0.down_proj", 64, 96, "int4 g32"));
  const TensorInfo* correction = reader_->find(prefix + "1.mlp.gate.e_score_correction_bias");
  ASSERT_NE(correction, nullptr);
  EXPECT_EQ(correction->dtype, DType::kF32);
  // Embedding, head, 5 of attention twice, a dense MLP, a router, shared and 4 routed experts.
  EXPECT_EQ(model_.matrices.size(), 2U + 10 + 3 + 1 + 3 + 12);
  EXPECT_EQ(model_.others.size(), 1U + 2 * 4 + 1);
  int64_t parameters = correction->elements();
  for (const auto& each : model_.matrices) {
    parameters += each->n() * each->k();
  }
  for (const TensorInfo* other : model_.others) {
    parameters += other == correction ? 0 : other->elements();
  }
  EXPECT_EQ(report->parameters, parameters);
  EXPECT_TRUE(file_exists((root_ / "out/tokenizer.json").string()));
}

TEST_F(DummyMoe, LayersWithoutExpertsAnnounceNoQuantization) {
  DummyOptions options;
  options.layers = 1;
  ASSERT_TRUE(make(deepseek_config(kInt4), options).ok());
  EXPECT_EQ(written_.find("quantization_config"), nullptr);
  matrix("model.layers.0.mlp.down_proj", 64, 192, "BF16");
}

TEST_F(DummyMoe, DeepSeekStoresFp8Blocks) {
  const auto report = make(deepseek_config(kFp8));
  ASSERT_TRUE(report.ok()) << report.status().message();
  expect_gaussian(matrix("model.layers.2.mlp.experts.3.up_proj", 96, 64, "fp8 blocks of 128x128"),
                  0.45);
  expect_gaussian(matrix("model.layers.0.mlp.down_proj", 64, 192, "fp8 blocks of 128x128"), 0.45);
  matrix("model.layers.2.mlp.gate", 4, 64, "BF16");
}

TEST_F(DummyMoe, ATypeLeavesQuantizationOut) {
  DummyOptions options;
  options.dtype = DType::kF16;
  ASSERT_TRUE(make(deepseek_config(kInt4), options).ok());
  EXPECT_EQ(written_.find("quantization_config"), nullptr);
  EXPECT_EQ(written_.find("dtype")->as_string(), "float16");
  expect_gaussian(matrix("model.layers.1.mlp.experts.0.gate_proj", 96, 64, "F16"));
}

TEST_F(DummyMoe, QwenAndGptOss) {
  const Json qwen = Json::object({{"architectures", JsonArray{"Qwen3MoeForCausalLM"}},
                                  {"hidden_size", 64},
                                  {"intermediate_size", 96},
                                  {"moe_intermediate_size", 32},
                                  {"max_position_embeddings", 64},
                                  {"num_hidden_layers", 1},
                                  {"num_experts", 3},
                                  {"num_experts_per_tok", 2},
                                  {"num_attention_heads", 4},
                                  {"num_key_value_heads", 2},
                                  {"head_dim", 32},
                                  {"vocab_size", 300},
                                  {"tie_word_embeddings", true}});
  ASSERT_TRUE(make(qwen).ok());
  matrix("model.layers.0.self_attn.k_proj", 64, 64, "BF16");
  matrix("model.layers.0.mlp.gate", 3, 64, "BF16");
  expect_gaussian(matrix("model.layers.0.mlp.experts.2.down_proj", 64, 32, "BF16"));
  EXPECT_EQ(by_module_.count("lm_head"), 0U);
  Json oss = qwen;
  oss.set("architectures", JsonArray{"GptOssForCausalLM"});
  oss.set("model_type", "gpt_oss");
  oss.set("num_local_experts", 2);
  oss.set("intermediate_size", 96);
  const auto plain = make(oss);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  expect_gaussian(matrix("model.layers.0.mlp.experts.1.up_proj", 96, 64, "BF16"));
  oss.set("quantization_config", Json::object({{"quant_method", "mxfp4"}}));
  ASSERT_TRUE(make(oss).ok());
  expect_gaussian(matrix("model.layers.0.mlp.experts.1.up_proj", 96, 64, "MXFP4"));
  expect_gaussian(matrix("model.layers.0.mlp.experts.0.down_proj", 64, 96, "MXFP4"));
  EXPECT_NE(reader_->find("model.layers.0.mlp.experts.gate_up_proj_bias"), nullptr);
  EXPECT_NE(reader_->find("model.layers.0.self_attn.sinks"), nullptr);
}

TEST_F(DummyMoe, RefusesWhatItCannotMake) {
  Json config = deepseek_config(kInt4);
  config.set("moe_intermediate_size", 40);
  EXPECT_THAT(make(config).status().message(), HasSubstr("no multiple"));
  config.set("moe_intermediate_size", -1);
  EXPECT_THAT(make(config).status().message(), HasSubstr("moe_intermediate_size"));
  config.as_object().erase("moe_intermediate_size");
  EXPECT_THAT(make(config).status().message(), HasSubstr("moe_intermediate_size"));
  config = deepseek_config(R"({"quant_method":"awq","bits":4})");
  EXPECT_EQ(make(config).status().code(), StatusCode::kUnsupported);
  DummyOptions more;
  more.layers = 4;
  EXPECT_THAT(make(deepseek_config(kInt4), more).status().message(), HasSubstr("--layers 4"));
}

}  // namespace
}  // namespace nibble
