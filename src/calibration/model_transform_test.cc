#include "calibration/model_transform.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "calibration/order_finder.h"
#include "calibration/transformed_model.h"
#include "checkpoint/checkpoint_reader.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "model/testing/sequence_runner.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class ModelTransforms : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / fmt::format("model_transforms_{}", ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (root_ / name).string(); }

  /// Logits of some tokens [tokens, vocab].
  static std::vector<float> logits(const std::string& folder) {
    const auto backend = make_cpu_backend({.threads = 2}).value();
    const auto model = load_model(folder, *backend, {.max_batch_tokens = 64}).value();
    std::vector<int32_t> tokens(40);
    std::iota(tokens.begin(), tokens.end(), 3);
    return SequenceRunner(*model, *backend, KvCode::kF32).feed(tokens);
  }

  std::string transformed(const std::string& source, const ModelTransform& transform) {
    const std::string folder = path("out");
    const Status written = write_transformed_model({.source = source,
                                                    .destination = folder,
                                                    .transform = &transform,
                                                    .stamp = Json::object({{"made", source}}),
                                                    .threads = 2});
    EXPECT_TRUE(written.ok()) << written.message();
    return folder;
  }

  fs::path root_;
};

// Random checkpoints of each family have gains, biases and sinks that are neither 0 nor 1.
TEST_F(ModelTransforms, RotatingChangesNothingThatTheModelComputes) {
  for (const char* family : {"llama2", "llama3", "llama_bias", "mistral", "qwen2", "qwen2_window",
                             "qwen3", "qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss"}) {
    const std::string source = std::string("tests/golden/") + family;
    const auto rotation = make_rotation(load_model_config(source).value(), 5);
    ASSERT_TRUE(rotation.ok());
    const std::string folder = transformed(source, **rotation);
    EXPECT_LT(distance(logits(folder), logits(source)), 2e-5) << family;
    const CheckpointReader before = CheckpointReader::open(source).value();
    const CheckpointReader after = CheckpointReader::open(folder).value();
    const std::string table = "model.embed_tokens.weight";
    EXPECT_FALSE(std::ranges::equal(before.find(table)->data, after.find(table)->data)) << family;
    EXPECT_NE(after.find("lm_head.weight"), nullptr) << family;
    EXPECT_FALSE(load_model_config(folder)->tie_word_embeddings) << family;
  }
}

// What down multiplies is turned while the changed model runs.
TEST_F(ModelTransforms, TurningInputsOfDownChangesNothingThatTheModelComputes) {
  for (const char* family : {"llama2", "llama3", "llama_bias", "mistral", "qwen2", "qwen3",
                             "qwen2_moe", "opt", "starcoder2"}) {
    const std::string source = std::string("tests/golden/") + family;
    const ModelConfig config = load_model_config(source).value();
    const auto turn = make_turn(config);
    ASSERT_TRUE(turn.ok()) << turn.status().message();
    const std::string folder = transformed(source, **turn);
    EXPECT_LT(distance(logits(folder), logits(source)), 2e-5) << family;
    const std::string text = read_file(folder + "/config.json").value();
    EXPECT_THAT(text, HasSubstr("transform_config")) << family;
    // Other programs that turn nothing would compute something else.
    std::ofstream(folder + "/config.json") << read_file(source + "/config.json").value();
    EXPECT_GT(distance(logits(folder), logits(source)), 1e-3) << family;
  }
}

TEST_F(ModelTransforms, TurnedInputsStayThroughOtherTransforms) {
  const std::string source = "tests/golden/qwen3";
  const ModelConfig config = load_model_config(source).value();
  const std::string turned = transformed(source, *make_turn(config).value());
  fs::rename(turned, path("turned"));
  const auto rotation = make_rotation(config, 5).value();
  const std::string folder = transformed(path("turned"), *rotation);
  EXPECT_LT(distance(logits(folder), logits(source)), 2e-5);
}

TEST_F(ModelTransforms, RefusesModelsWithoutInputsToTurn) {
  const Status status = make_turn(load_model_config("tests/golden/mixtral").value()).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("--online-rotation"));
}

TEST_F(ModelTransforms, AModelThatIsTurnedElsewhereIsNotLoaded) {
  const std::string folder = transformed(
      "tests/golden/qwen3", *make_turn(load_model_config("tests/golden/qwen3").value()).value());
  std::string text = read_file(folder + "/config.json").value();
  const size_t at = text.find("down_proj");
  ASSERT_NE(at, std::string::npos);
  std::ofstream(folder + "/config.json") << text.replace(at, 9, "up_proj");
  const auto backend = make_cpu_backend({.threads = 1}).value();
  const Status status = load_model(folder, *backend, {.max_batch_tokens = 64}).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("transform_config"), HasSubstr("up_proj")));
}

/// Any order of `count` numbers from `first` on.
void append_shuffled(int64_t first,
                     int64_t count,
                     std::mt19937& random,
                     std::vector<int32_t>& order) {
  const auto begin = order.insert(order.end(), static_cast<size_t>(count), 0);
  std::iota(begin, order.end(), static_cast<int32_t>(first));
  std::shuffle(begin, order.end(), random);
}

std::vector<int32_t> shuffled(int64_t count, std::mt19937& random) {
  std::vector<int32_t> order;
  append_shuffled(0, count, random, order);
  return order;
}

ChannelOrders any_orders(const ModelConfig& config) {
  std::mt19937 random(4);
  ChannelOrders orders{.stream = shuffled(config.hidden_size, random)};
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const bool experts = has_experts(config, i);
    ChannelOrders::Layer layer;
    for (int64_t head = 0; head < config.num_kv_heads; ++head) {
      append_shuffled(head * config.head_dim, config.head_dim, random, layer.values);
    }
    layer.down = shuffled(experts ? config.moe.shared_width : config.intermediate_size, random);
    for (int64_t expert = 0; experts && expert < config.moe.experts; ++expert) {
      layer.experts.push_back(shuffled(config.moe.width, random));
    }
    orders.layers.push_back(std::move(layer));
  }
  return orders;
}

TEST_F(ModelTransforms, PermutingChangesNothingThatTheModelComputes) {
  for (const char* family :
       {"llama2", "llama3", "llama_bias", "mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_moe",
        "mixtral", "qwen2_moe", "gpt_oss", "opt", "starcoder2"}) {
    const std::string source = std::string("tests/golden/") + family;
    const ModelConfig config = load_model_config(source).value();
    const std::string folder = transformed(source, *make_permutation(config, any_orders(config)));
    EXPECT_LT(distance(logits(folder), logits(source)), 2e-5) << family;
    const CheckpointReader before = CheckpointReader::open(source).value();
    const CheckpointReader after = CheckpointReader::open(folder).value();
    for (const TensorInfo* tensor : before.tensors()) {
      if (tensor->name.ends_with("o_proj.weight")) {
        EXPECT_FALSE(std::ranges::equal(tensor->data, after.find(tensor->name)->data)) << family;
      }
    }
  }
}

// Channels lie by their size afterwards, and what the model computes is the same.
TEST_F(ModelTransforms, OrdersAreThoseOfATextsChannels) {
  for (const char* family : {"llama3", "qwen2_moe", "gpt_oss", "opt"}) {
    const std::string source = std::string("tests/golden/") + family;
    const ModelConfig config = load_model_config(source).value();
    std::vector<int32_t> window(40);
    std::iota(window.begin(), window.end(), 3);
    const std::vector<std::vector<int32_t>> windows = {window, window};
    for (const OrderKey key : {OrderKey::kMeanSquare, OrderKey::kLargest}) {
      const auto find = [&](const std::string& model, int threads) {
        return find_orders({.model = model,
                            .windows = windows,
                            .key = key,
                            .beside = path("states"),
                            .threads = threads})
            .value();
      };
      const ChannelOrders orders = find(source, 2);
      EXPECT_EQ(find(source, 1).stream, orders.stream);
      EXPECT_EQ(std::ssize(orders.layers), config.num_layers);
      const std::string folder = transformed(source, *make_permutation(config, orders));
      EXPECT_LT(distance(logits(folder), logits(source)), 2e-5) << family;
      fs::remove_all(folder);
      if (key == OrderKey::kLargest && !has_experts(config, 0)) {  // no sums in other orders
        const std::string again = transformed(source, *make_permutation(config, orders));
        EXPECT_TRUE(std::ranges::is_sorted(find(again, 2).layers[0].down)) << family;
        fs::remove_all(again);
      }
    }
  }
}

// Powers of two round nothing, so not one bit changes.
TEST_F(ModelTransforms, ScalingChangesNotOneBitOfTheLogits) {
  std::mt19937 random(3);
  for (const char* family : {"llama3", "llama_bias", "qwen2", "qwen3", "mixtral", "opt"}) {
    const std::string source = std::string("tests/golden/") + family;
    const ModelConfig config = load_model_config(source).value();
    const auto powers = [&](int64_t count) {
      std::vector<float> factors;
      for (int64_t i = 0; i < count; ++i) {
        factors.push_back(std::ldexp(1.0F, static_cast<int>(random() % 7) - 3));
      }
      return factors;
    };
    std::vector<LayerFactors> factors;
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      LayerFactors of_layer{.qkv = powers(config.hidden_size),
                            .values = powers(config.num_kv_heads * config.head_dim)};
      if (!has_experts(config, layer)) {
        of_layer.up = powers(config.hidden_size);
        of_layer.down = powers(config.intermediate_size);
      }
      factors.push_back(std::move(of_layer));
    }
    const std::string folder = transformed(source, *make_scaling(config, factors));
    EXPECT_EQ(logits(folder), logits(source)) << family;
    const CheckpointReader before = CheckpointReader::open(source).value();
    const CheckpointReader after = CheckpointReader::open(folder).value();
    for (const TensorInfo* tensor : before.tensors()) {
      if (tensor->name.find("q_proj.weight") != std::string::npos) {
        EXPECT_FALSE(std::ranges::equal(tensor->data, after.find(tensor->name)->data)) << family;
      }
    }
  }
}

TEST_F(ModelTransforms, AFolderWithTheSameStampIsKept) {
  const std::string source = "tests/golden/llama3";
  const auto rotation = make_rotation(load_model_config(source).value(), 5).value();
  const std::string folder = transformed(source, *rotation);
  EXPECT_TRUE(has_stamp(folder, Json::object({{"made", source}})));
  EXPECT_FALSE(has_stamp(folder, Json::object({{"made", "another"}})));
  const auto written = fs::last_write_time(folder + "/config.json");
  transformed(source, *rotation);
  EXPECT_EQ(fs::last_write_time(folder + "/config.json"), written);
}

TEST_F(ModelTransforms, RefusesModelsThatCannotBeRotated) {
  const Status status = make_rotation(load_model_config("tests/golden/opt").value(), 0).status();
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("mean"));
}

}  // namespace
}  // namespace nibble
