#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "base/f16.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "model/model.h"
#include "model/tensor_check.h"
#include "model/testing/sequence_runner.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kSource = "tests/golden/llama3";

/// Two layers whose keys and values are larger than those of kSource: keys 2^7 and 2^5 times,
/// values 2^9 and 2^-9 times. Queries and outputs make up for it, and powers of two round nothing.
constexpr int kKeyPower[2] = {7, 5};
constexpr int kValuePower[2] = {9, -9};

int power_of(const std::string& name) {
  const auto of_layer = [&](const int(&powers)[2]) {
    return powers[name.find("layers.0.") != std::string::npos ? 0 : 1];
  };
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  return has("k_proj")   ? of_layer(kKeyPower)
         : has("q_proj") ? -of_layer(kKeyPower)
         : has("v_proj") ? of_layer(kValuePower)
         : has("o_proj") ? -of_layer(kValuePower)
                         : 0;
}

std::vector<std::byte> scaled(const TensorInfo& tensor, int power) {
  std::vector<std::byte> bytes(tensor.data.begin(), tensor.data.end());
  CHECK(power == 0 || tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16);
  for (size_t i = 0; power != 0 && i < bytes.size();) {
    uint32_t bits = 0;
    const size_t size = tensor.dtype == DType::kF32 ? 4 : 2;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, bytes.data() + i, size);
    const float value = std::ldexp(std::bit_cast<float>(bits), power);
    bits = std::bit_cast<uint32_t>(value);
    std::memcpy(bytes.data() + i, reinterpret_cast<const char*>(&bits) + 4 - size, size);
    i += size;
  }
  return bytes;
}

struct Scale {
  std::string name;
  float value;
};

class ModelKvScales : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    backend_ = make_cpu_backend({.threads = 2}).value();
    tokens_.resize(90);
    std::iota(tokens_.begin(), tokens_.end(), 3);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// kSource with larger keys and values and these scales.
  void write(const std::vector<Scale>& scales) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    fs::copy(fs::path(kSource) / "config.json", folder_);
    const auto source = CheckpointReader::open(kSource).value();
    std::vector<TensorPlan> plan;
    for (const TensorInfo* tensor : source.tensors()) {
      plan.push_back({tensor->name, tensor->dtype, tensor->shape});
    }
    for (const Scale& scale : scales) {
      plan.push_back({scale.name, DType::kF32, {1}});
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 30).value();
    for (const TensorInfo* tensor : source.tensors()) {
      CHECK(writer.write(tensor->name, scaled(*tensor, power_of(tensor->name))).ok());
    }
    for (const Scale& scale : scales) {
      CHECK(writer.write(scale.name, std::as_bytes(std::span(&scale.value, 1))).ok());
    }
    CHECK(writer.finish().ok());
  }

  /// The scales that undo what write() does.
  static std::vector<Scale> fitting() {
    std::vector<Scale> scales;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
      scales.push_back({prefix + "k_scale", std::ldexp(1.0F, kKeyPower[layer])});
      scales.push_back({prefix + "v_scale", std::ldexp(1.0F, kValuePower[layer])});
    }
    return scales;
  }

  std::vector<float> logits(const std::string& folder, KvCode code) {
    auto model = load_model(folder, *backend_, {.max_batch_tokens = 512, .max_logit_rows = 512});
    CHECK_MSG(model.ok(), "{}", model.status().message());
    return SequenceRunner(**model, *backend_, code).feed_in_chunks(tokens_, 1, 70);
  }

  fs::path folder_;
  std::unique_ptr<Backend> backend_;
  std::vector<int32_t> tokens_;
};

TEST_F(ModelKvScales, AreThoseThatTheKeysAndValuesNeed) {
  ASSERT_EQ(load_model_config(kSource)->num_layers, 2);
  write(fitting());
  const std::vector<float> expected = logits(kSource, KvCode::kFp8);
  EXPECT_EQ(logits(folder_.string(), KvCode::kFp8), expected);
  EXPECT_TRUE(check_model_tensors(folder_.string()).ok());
  EXPECT_TRUE(check_loadable(folder_.string()).ok());
  write({});
  EXPECT_NE(logits(folder_.string(), KvCode::kFp8), expected);
}

TEST_F(ModelKvScales, ChangeNoOtherCache) {
  write(fitting());
  std::vector<std::vector<float>> with;
  for (const KvCode code : {KvCode::kF32, KvCode::kBf16, KvCode::kInt8, KvCode::kInt4}) {
    with.push_back(logits(folder_.string(), code));
  }
  write({});
  EXPECT_EQ(logits(folder_.string(), KvCode::kF32), with[0]);
  EXPECT_EQ(logits(folder_.string(), KvCode::kBf16), with[1]);
  EXPECT_EQ(logits(folder_.string(), KvCode::kInt8), with[2]);
  EXPECT_EQ(logits(folder_.string(), KvCode::kInt4), with[3]);
}

TEST_F(ModelKvScales, AreRefusedWhereTheyCannotBeUsed) {
  const auto refused = [&](const std::vector<Scale>& scales, const std::string& words) {
    write(scales);
    const auto model = load_model(folder_.string(), *backend_, {});
    ASSERT_FALSE(model.ok());
    EXPECT_THAT(model.status().message(), HasSubstr(words));
    EXPECT_THAT(check_model_tensors(folder_.string()).message(), HasSubstr(words));
    EXPECT_THAT(check_loadable(folder_.string()).message(), HasSubstr(words));
  };
  std::vector<Scale> scales = fitting();
  scales[3].value = -2.0F;
  refused(scales, "model.layers.1.self_attn.v_scale: the scale of an FP8 cache is -2");
  scales.pop_back();
  refused(scales, "model.layers.1.self_attn.k_scale: the scale of the layer's values is missing");
  scales = fitting();
  scales.push_back({"model.layers.2.self_attn.k_scale", 1.0F});
  refused(scales, "model.layers.2.self_attn.k_scale");
}

}  // namespace
}  // namespace nibble
