#include "checkpoint/kv_scales.h"

#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "checkpoint/checkpoint_writer.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kLayer = "model.layers.3.self_attn";

struct Stored {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

class KvScalesTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
  }
  void TearDown() override { fs::remove_all(folder_); }

  Result<StoredKvScales> read(const std::vector<Stored>& tensors) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::vector<TensorPlan> plan = {{"model.norm.weight", DType::kF32, {1}}};
    for (const Stored& tensor : tensors) {
      plan.push_back({kLayer + tensor.name, tensor.dtype, tensor.shape});
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 20).value();
    CHECK(writer.write("model.norm.weight", std::vector<std::byte>(4)).ok());
    for (const Stored& tensor : tensors) {
      std::vector<uint16_t> halves;
      for (const float value : tensor.values) {
        halves.push_back(tensor.dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value));
      }
      const bool wide = tensor.dtype == DType::kF32;
      CHECK(writer
                .write(kLayer + tensor.name, wide ? std::as_bytes(std::span(tensor.values))
                                                  : std::as_bytes(std::span(halves)))
                .ok());
    }
    CHECK(writer.finish().ok());
    reader_.emplace(CheckpointReader::open(folder_.string()).value());
    return read_kv_scales(*reader_, kLayer + ".k_proj", kLayer + ".v_proj");
  }

  fs::path folder_;
  std::optional<CheckpointReader> reader_;
};

TEST_F(KvScalesTest, ReadsEveryNameTypeAndShape) {
  const std::pair<std::string, std::string> names[] = {
      {".k_scale", ".v_scale"},
      {".attn.k_scale", ".attn.v_scale"},
      {".k_proj.k_scale", ".v_proj.v_scale"},
      {".k_proj.output_scale", ".v_proj.output_scale"},
      {".attn.k_scale", ".v_proj.v_scale"}};
  for (const auto& [k, v] : names) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}, {1, 1, 1}}) {
        const auto stored = read({{k, dtype, shape, {0.0625F}}, {v, dtype, shape, {3.0F}}});
        ASSERT_TRUE(stored.ok()) << stored.status().message();
        ASSERT_TRUE(stored->scales.has_value()) << k;
        EXPECT_EQ(stored->scales->k, 0.0625F);
        EXPECT_EQ(stored->scales->v, 3.0F);
        EXPECT_EQ(stored->tensors.size(), 2U);
        EXPECT_TRUE(is_kv_scale(stored->tensors[0]->name));
        EXPECT_TRUE(is_kv_scale(stored->tensors[1]->name));
      }
    }
  }
}

TEST_F(KvScalesTest, OneScaleForBothAndNone) {
  const auto both = read({{".kv_scale", DType::kF32, {}, {0.5F}}});
  ASSERT_TRUE(both.ok()) << both.status().message();
  ASSERT_TRUE(both->scales.has_value());
  EXPECT_EQ(both->scales->k, 0.5F);
  EXPECT_EQ(both->scales->v, 0.5F);
  const auto queries = read({{".q_scale", DType::kF32, {1}, {2.0F}}});
  ASSERT_TRUE(queries.ok());
  EXPECT_FALSE(queries->scales.has_value());
  EXPECT_EQ(queries->tensors.size(), 1U);
  const auto none = read({{".k_proj.input_scale", DType::kF32, {1}, {2.0F}}});
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->scales.has_value());
  EXPECT_TRUE(none->tensors.empty());
}

TEST_F(KvScalesTest, RefusesWhatIsNoScale) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad :
       {0.0F, -1.0F, kInfinity, std::numeric_limits<float>::quiet_NaN(), 1e-40F}) {
    for (const bool key : {true, false}) {
      const auto stored = read({{".k_scale", DType::kF32, {1}, {key ? bad : 1.0F}},
                                {".v_scale", DType::kF32, {1}, {key ? 1.0F : bad}}});
      ASSERT_FALSE(stored.ok()) << bad;
      EXPECT_EQ(stored.status().code(), StatusCode::kCorrupt);
      const std::string& message = stored.status().message();
      EXPECT_THAT(message, HasSubstr(kLayer + (key ? ".k_scale" : ".v_scale")));
      EXPECT_THAT(message, HasSubstr(fmt::format(" is {}, but must be positive", bad)));
    }
  }
}

TEST_F(KvScalesTest, RefusesHalvesDoublesAndHeads) {
  const Stored k{".k_scale", DType::kF32, {1}, {0.5F}};
  const Stored v{".v_scale", DType::kF32, {1}, {0.5F}};
  auto stored = read({k});
  EXPECT_EQ(stored.status().code(), StatusCode::kCorrupt);
  EXPECT_THAT(stored.status().message(), HasSubstr("k_scale: the scale of the layer's values"));
  stored = read({v});
  EXPECT_THAT(stored.status().message(), HasSubstr("v_scale: the scale of the layer's keys"));
  stored = read({k, v, {".k_proj.k_scale", DType::kF32, {1}, {0.5F}}});
  EXPECT_EQ(stored.status().code(), StatusCode::kCorrupt);
  EXPECT_THAT(stored.status().message(),
              HasSubstr("k_proj.k_scale: " + kLayer + ".k_scale says the same"));
  stored = read({k, {".v_scale", DType::kF32, {2, 1, 1}, {0.5F, 0.25F}}});
  EXPECT_EQ(stored.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(stored.status().message(), HasSubstr("v_scale: shape [2, 1, 1]"));
}

}  // namespace
}  // namespace nibble
