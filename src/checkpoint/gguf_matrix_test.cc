#include "checkpoint/gguf_matrix.h"

#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "gguf/decode.h"
#include "gguf/testing/gguf_builder.h"
#include "quant/codec.h"

namespace nibble {
namespace {

using gguf::Type;
using testing::HasSubstr;

constexpr int64_t kRows = 24, kColumns = 96, kHeads = 3;
constexpr const char* kUp = "model.layers.0.mlp.up_proj";
constexpr const char* kQuery = "model.layers.0.self_attn.q_proj";

/// Rows of random blocks with finite scales.
std::vector<std::byte> random_rows(Type type) {
  std::mt19937 random(static_cast<uint32_t>(type));
  const auto bytes = static_cast<size_t>(gguf::type_traits(type).bytes);
  std::vector<std::byte> data(static_cast<size_t>(kRows * kColumns / 32) * bytes);
  for (std::byte& byte : data) {
    byte = static_cast<std::byte>(random());
  }
  for (size_t block = 0; block < data.size(); block += bytes) {
    data[block + 1] &= std::byte{0xbb};  // below infinity
    data[block + 3] &= type == Type::kQ4_1 ? std::byte{0xbb} : std::byte{0xff};
  }
  return data;
}

std::vector<float> decoded(Type type, const std::vector<std::byte>& data) {
  std::vector<float> values(static_cast<size_t>(kRows * kColumns));
  gguf::decode_blocks(type, data.data(), kRows * kColumns / 32, values.data());
  return values;
}

std::vector<float> values_of(const QuantView& view) {
  const QuantTensor tensor = copy_of(view).value();
  std::vector<float> values(static_cast<size_t>(view.n * view.k));
  for (int64_t row = 0; row < view.n; ++row) {
    decode_row(tensor, row, values.data() + row * view.k);
  }
  return values;
}

class GgufMatrix : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::path(testing::TempDir()) /
            (std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) + ".gguf");
  }
  void TearDown() override { std::filesystem::remove(path_); }

  /// A Llama's up_proj and q_proj of the same rows.
  CheckpointReader open(Type type, const std::vector<std::byte>& data) {
    gguf::GgufBuilder()
        .add("general.architecture", std::string("llama"))
        .add("llama.attention.head_count", uint32_t{kHeads})
        .add_tensor("blk.0.ffn_up.weight", type, {kRows, kColumns}, data)
        .add_tensor("blk.0.attn_q.weight", type, {kRows, kColumns}, data)
        .write(path_);
    return CheckpointReader::open(path_).value();
  }

  std::string path_;
};

TEST_F(GgufMatrix, RunsAsTheFileHasIt) {
  const auto check = [&](Type type, WeightCode code, ZeroPoints zero_points) {
    SCOPED_TRACE(gguf::type_traits(type).name);
    const std::vector<std::byte> data = random_rows(type);
    const CheckpointReader reader = open(type, data);
    const auto linear = map_linear_weights(reader, {}, kUp);
    ASSERT_TRUE(linear.ok()) << linear.status().message();
    EXPECT_EQ(linear->weight.format,
              (WeightFormat{code, ScalePer::kGroup, 32, DType::kF16, zero_points}));
    EXPECT_EQ(linear->weight.scale_type, DType::kF16);
    EXPECT_EQ(linear->decoded, "");
    EXPECT_EQ(values_of(linear->weight), decoded(type, data));
  };
  check(Type::kQ4_0, WeightCode::kInt4, ZeroPoints::kNone);
  check(Type::kQ4_1, WeightCode::kInt4, ZeroPoints::kMinimum);
  check(Type::kQ8_0, WeightCode::kInt8, ZeroPoints::kNone);
}

TEST_F(GgufMatrix, RowsOfPairedHeadsComeInTheOrderOfHuggingFace) {
  const std::vector<std::byte> data = random_rows(Type::kQ4_1);
  const CheckpointReader reader = open(Type::kQ4_1, data);
  const std::vector<float> got = values_of(map_linear_weights(reader, {}, kQuery).value().weight);
  const std::vector<float> stored = decoded(Type::kQ4_1, data);
  constexpr int64_t kSize = kRows / kHeads;  // 8 rows: 0 2 4 6 and 1 3 5 7 of the file
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t within = row % kSize;
    const int64_t from = row - within + (within < 4 ? 2 * within : 2 * (within - 4) + 1);
    EXPECT_EQ(std::memcmp(&got[static_cast<size_t>(row * kColumns)],
                          &stored[static_cast<size_t>(from * kColumns)], kColumns * sizeof(float)),
              0)
        << row;
  }
}

TEST_F(GgufMatrix, WhatProductsDoNotTakeBecomesBf16) {
  const std::vector<std::byte> data = random_rows(Type::kQ4_1);
  const CheckpointReader reader = open(Type::kQ4_1, data);
  const RunsFormat none = [](const WeightFormat& /*format*/, int64_t /*k*/) { return false; };
  const MappedLinear linear = map_linear_weights(reader, {}, kUp, none).value();
  EXPECT_EQ(linear.weight.format.code, WeightCode::kBf16);
  EXPECT_EQ(linear.decoded, "Q4_1");
  std::vector<float> expected = decoded(Type::kQ4_1, data);
  for (float& value : expected) {
    value = bf16_to_f32(f32_to_bf16(value));
  }
  EXPECT_EQ(values_of(linear.weight), expected);
}

TEST_F(GgufMatrix, RefusesNumbersThatAreNotFinite) {
  for (const auto& [at, what] : {std::pair(1, "scale"), std::pair(3, "minimum")}) {
    std::vector<std::byte> data = random_rows(Type::kQ4_1);
    const size_t block = static_cast<size_t>(5 * kColumns / 32 + 2) * 20;  // the third of row 5
    data[block + static_cast<size_t>(at)] = std::byte{0x7c};
    const CheckpointReader reader = open(Type::kQ4_1, data);
    const Status refused = map_linear_weights(reader, {}, kUp).status();
    EXPECT_EQ(refused.code(), StatusCode::kCorrupt);
    EXPECT_THAT(refused.message(), HasSubstr(std::string("the ") + what + " of row 5, block 2"));
    EXPECT_THAT(refused.message(), HasSubstr("mlp.up_proj"));
  }
}

}  // namespace
}  // namespace nibble
