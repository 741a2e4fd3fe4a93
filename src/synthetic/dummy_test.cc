#include "synthetic/dummy.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_reader.h"
#include "model/model.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kGoldens[] = {
    "llama2",       "llama3",     "llama_bias", "mistral",   "qwen2",     "qwen3",  "opt",
    "qwen2_window", "starcoder2", "gpt_oss",    "qwen2_moe", "qwen3_moe", "mixtral"};

class Dummy : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            (std::string("dummy_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string path(const std::string& name) const { return (root_ / name).string(); }

  DummyOptions options(const std::string& config, const std::string& out) const {
    return {.config = config, .destination = path(out)};
  }

  /// config.json of a Llama with members replaced (null: removed).
  std::string write_config(const std::vector<JsonObject::Member>& changes) const {
    Json json = Json::object({{"architectures", JsonArray{"LlamaForCausalLM"}},
                              {"hidden_size", 64},
                              {"intermediate_size", 96},
                              {"num_hidden_layers", 3},
                              {"num_attention_heads", 4},
                              {"num_key_value_heads", 2},
                              {"max_position_embeddings", 64},
                              {"vocab_size", 512},
                              {"bos_token_id", 1},
                              {"eos_token_id", 2},
                              {"torch_dtype", "bfloat16"}});
    for (auto& [key, value] : changes) {
      json.as_object().erase(key);
      if (!value.is_null()) {
        json.set(key, value);
      }
    }
    std::ofstream(root_ / "config.json") << json.dump();
    return path("config.json");
  }

  fs::path root_;
};

std::string weights_of(const std::string& folder) {
  return read_file(folder + "/model.safetensors").value();
}

// The loader refuses missing and left-over tensors, so the list of names is checked against it.
TEST_F(Dummy, EveryArchitectureLoads) {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  for (const char* name : kGoldens) {
    SCOPED_TRACE(name);
    const std::string config = std::string("tests/golden/") + name + "/config.json";
    const auto report = make_dummy_checkpoint(options(config, name));
    ASSERT_TRUE(report.ok()) << report.status().message();
    const auto reader = CheckpointReader::open(path(name)).value();
    const auto golden = CheckpointReader::open(std::string("tests/golden/") + name).value();
    std::set<std::string> names;
    std::set<std::string> expected;
    for (const TensorInfo* info : reader.tensors()) names.insert(info->name);
    for (const TensorInfo* info : golden.tensors()) expected.insert(info->name);
    if (name != std::string("qwen2_moe")) {  // whose golden file has its experts in one tensor
      EXPECT_EQ(names, expected);
    }
    EXPECT_EQ(report->tensors, static_cast<int64_t>(names.size()));
    const auto model = load_model(path(name), *backend, {});
    EXPECT_TRUE(model.ok()) << model.status().message();
  }
}

TEST_F(Dummy, ValuesAreGaussianAndNormsOne) {
  const std::string config = write_config({});
  ASSERT_TRUE(make_dummy_checkpoint(options(config, "out")).ok());
  const auto reader = CheckpointReader::open(path("out")).value();
  const TensorInfo* norm = reader.require("model.norm.weight").value();
  for (const uint16_t value : std::span(reinterpret_cast<const uint16_t*>(norm->data.data()), 64)) {
    EXPECT_EQ(bf16_to_f32(value), 1.0F);
  }
  const TensorInfo* table = reader.require("model.embed_tokens.weight").value();
  const std::span values(reinterpret_cast<const uint16_t*>(table->data.data()), 512 * 64);
  double sum = 0;
  double squares = 0;
  int within = 0;
  for (const uint16_t value : values) {
    const double x = bf16_to_f32(value) / 0.02;
    sum += x;
    squares += x * x;
    within += std::abs(x) < 1 ? 1 : 0;
  }
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, 0, 4 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 4 * std::sqrt(2 / count));
  EXPECT_NEAR(within / count, 0.6827, 0.012);
}

TEST_F(Dummy, DependsOnTheSeedAndNotOnThreadsOrLayers) {
  const std::string config = write_config({});
  DummyOptions one = options(config, "one");
  one.threads = 1;
  DummyOptions three = options(config, "three");
  three.threads = 3;
  DummyOptions other = options(config, "other");
  other.seed = 1;
  DummyOptions less = options(config, "less");
  less.layers = 1;
  for (const auto* each : {&one, &three, &other, &less}) {
    ASSERT_TRUE(make_dummy_checkpoint(*each).ok());
  }
  EXPECT_EQ(weights_of(path("one")), weights_of(path("three")));
  EXPECT_NE(weights_of(path("one")), weights_of(path("other")));
  const auto whole = CheckpointReader::open(path("one")).value();
  const auto part = CheckpointReader::open(path("less")).value();
  EXPECT_LT(part.tensors().size(), whole.tensors().size());
  for (const TensorInfo* info : part.tensors()) {
    const TensorInfo* same = whole.require(info->name).value();
    EXPECT_TRUE(std::ranges::equal(info->data, same->data)) << info->name;
  }
}

TEST_F(Dummy, LayersAndTypeChangeTheConfig) {
  DummyOptions few = options(write_config({{"layer_types", JsonArray{"a", "b", "c"}},
                                           {"quantization_config", Json::object({})}}),
                             "out");
  few.layers = 2;
  few.dtype = DType::kF32;
  few.shard_bytes = 100000;
  const auto report = make_dummy_checkpoint(few);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const Json json = Json::parse(read_file(path("out/config.json")).value()).value();
  EXPECT_EQ(json.find("num_hidden_layers")->as_int(), 2);
  EXPECT_EQ(json.find("layer_types")->as_array().size(), 2U);
  EXPECT_EQ(json.find("dtype")->as_string(), "float32");
  EXPECT_EQ(json.find("torch_dtype"), nullptr);
  EXPECT_EQ(json.find("quantization_config"), nullptr);
  EXPECT_TRUE(file_exists(path("out/model.safetensors.index.json")));
  const auto reader = CheckpointReader::open(path("out")).value();
  EXPECT_EQ(reader.total_bytes(), report->parameters * 4);
}

TEST_F(Dummy, RefusesWhatItCannotMake) {
  DummyOptions more = options(write_config({}), "out");
  more.layers = 4;
  EXPECT_THAT(make_dummy_checkpoint(more).status().message(),
              testing::AllOf(HasSubstr("--layers 4"), HasSubstr("num_hidden_layers 3")));
  const auto missing =
      make_dummy_checkpoint(options(write_config({{"intermediate_size", nullptr}}), "out"));
  EXPECT_THAT(missing.status().message(), HasSubstr("\"intermediate_size\" is missing"));
  const auto unknown = make_dummy_checkpoint(
      options(write_config({{"architectures", JsonArray{"MambaForCausalLM"}}}), "out"));
  EXPECT_EQ(unknown.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(unknown.status().message(), HasSubstr("MambaForCausalLM"));
  EXPECT_FALSE(file_exists(path("out")));
  fs::create_directories(root_ / "out");
  const auto existing = make_dummy_checkpoint(options(write_config({}), "out"));
  EXPECT_EQ(existing.status().code(), StatusCode::kAlreadyExists);
}

TEST_F(Dummy, SmallVocabulariesGetNoTokenizer) {
  ASSERT_TRUE(make_dummy_checkpoint(options(write_config({{"vocab_size", 257}}), "few")).ok());
  EXPECT_FALSE(file_exists(path("few/tokenizer.json")));
  ASSERT_TRUE(make_dummy_checkpoint(options(write_config({{"vocab_size", 258}}), "enough")).ok());
  EXPECT_TRUE(file_exists(path("enough/tokenizer.json")));
}

}  // namespace
}  // namespace nibble
