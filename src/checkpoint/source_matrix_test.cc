#include "checkpoint/source_matrix.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/source_kernels.h"
#include "quant/codec.h"

namespace nibble {
namespace {

// All 65536 halves, in a row longer than a block and starting at an odd address.
TEST(DecodePlain, EveryHalfEqualsTheScalarConversion) {
  std::vector<std::byte> bytes(1 + 65536 * 2);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(bytes.data() + 1 + i * 2, &bits, 2);
  }
  std::vector<float> out(65536);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    decode_plain(dtype, bytes.data() + 1, 65536, out.data());
    for (uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<uint16_t>(i);
      const float expected = dtype == DType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
      ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected)) << i;
    }
  }
}

// Every code of every form, at every offset within a block, against the scalar definitions.
TEST(DecodeLevels, EveryCodeEqualsItsDefinition) {
  std::vector<std::byte> bytes(1 + 512);
  for (size_t i = 0; i < 512; ++i) {
    bytes[1 + i] = static_cast<std::byte>(i * 181 % 256);
  }
  const auto byte = [&](int64_t i) {
    return std::to_integer<uint8_t>(bytes[1 + static_cast<size_t>(i)]);
  };
  const auto nibble = [&](int64_t i) {
    return static_cast<uint8_t>(byte(i / 2) >> (i % 2 * 4) & 15);
  };
  const std::vector<std::pair<CodeForm, std::function<float(int64_t)>>> forms = {
      {CodeForm::kInt8,
       [&](int64_t i) { return static_cast<float>(static_cast<int8_t>(byte(i))); }},
      {CodeForm::kInt8Offset, [&](int64_t i) { return static_cast<float>(byte(i) - 128); }},
      {CodeForm::kE4M3, [&](int64_t i) { return decode_e4m3(byte(i)); }},
      {CodeForm::kE2M1, [&](int64_t i) { return decode_e2m1(nibble(i)); }},
      {CodeForm::kNibbles, [&](int64_t i) { return static_cast<float>(nibble(i) - 8); }},
  };
  std::vector<float> scales = {0.5F, -3, 1.25F, 7, 0.1F, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  for (const auto& [form, expected] : forms) {
    for (int64_t count = 1; count <= 512; count += count < 70 ? 1 : 61) {
      std::vector<float> out(static_cast<size_t>(count));
      decode_levels(form, {}, bytes.data() + 1, count, out.data());
      std::vector<float> scaled(out.size());
      decode_scaled({.form = form,
                     .in = bytes.data() + 1,
                     .count = count,
                     .scales = scales.data(),
                     .group_size = 32},
                    scaled.data());
      for (int64_t i = 0; i < count; ++i) {
        const float want = expected(i);
        const float product = want * scales[static_cast<size_t>(i / 32)];
        const auto at = static_cast<size_t>(i);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(out[at]) && std::isnan(scaled[at]));
          continue;
        }
        ASSERT_EQ(std::bit_cast<uint32_t>(out[at]), std::bit_cast<uint32_t>(want)) << i;
        ASSERT_EQ(std::bit_cast<uint32_t>(scaled[at]), std::bit_cast<uint32_t>(product)) << i;
      }
    }
  }
}

struct Stored {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<float> values;  // of plain types, fewer are repeated
};

class SourceModels : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::path(testing::TempDir()) /
        (std::string("models_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Result<SourceModel> list(const std::map<std::string, Stored>& tensors,
                           const std::string& config) {
    std::vector<TensorPlan> plan;
    for (const auto& [name, tensor] : tensors) {
      plan.push_back({name, tensor.dtype, tensor.shape, 0});
    }
    std::filesystem::remove(folder_ / "model.safetensors");
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 30).value();
    for (const auto& [name, tensor] : tensors) {
      const auto bytes = static_cast<size_t>(tensor_bytes(tensor.dtype, tensor.shape).value());
      std::vector<std::byte> data(bytes);
      for (size_t i = 0; !tensor.values.empty() && i < bytes / 4; ++i) {
        std::memcpy(data.data() + i * 4, &tensor.values[i % tensor.values.size()], 4);
      }
      EXPECT_TRUE(writer.write(name, data).ok());
    }
    EXPECT_TRUE(writer.finish().ok());
    reader_ = std::make_unique<CheckpointReader>(CheckpointReader::open(folder_.string()).value());
    return list_source_matrices(*reader_, Json::parse(config).value());
  }

  void write_file(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
  }

  std::filesystem::path folder_;
  std::unique_ptr<CheckpointReader> reader_;
};

std::vector<float> rows_of(const SourceMatrix& matrix, int64_t row, int64_t rows) {
  std::vector<float> out(static_cast<size_t>(rows * matrix.k()));
  EXPECT_TRUE(matrix.decode(row, rows, out.data()).ok());
  return out;
}

std::vector<float> counted(int64_t count) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(i));
  }
  return values;
}

// gpt-oss: [experts, in, out], gate and up alternating along out. More rows than a tile.
TEST_F(SourceModels, FusedExpertsOfGptOssAreTurnedAndSplit) {
  constexpr int64_t kHidden = 35;
  constexpr int64_t kWidth = 140;
  const auto model =
      list({{"l.mlp.experts.gate_up_proj",
             {DType::kF32, {2, kHidden, 2 * kWidth}, counted(2 * kHidden * 2 * kWidth)}},
            {"l.mlp.experts.down_proj",
             {DType::kF32, {2, kWidth, kHidden}, counted(2 * kHidden * kWidth)}}},
           R"({"model_type":"gpt_oss","hidden_size":35})");
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_TRUE(model->others.empty());
  ASSERT_EQ(model->matrices.size(), 6U);
  for (const auto& matrix : model->matrices) {
    SCOPED_TRACE(matrix->module());
    const int64_t expert = matrix->module().find(".1.") != std::string::npos ? 1 : 0;
    const bool down = matrix->module().ends_with("down_proj");
    const int64_t up = matrix->module().ends_with("up_proj") ? 1 : 0;
    ASSERT_EQ(matrix->n(), down ? kHidden : kWidth);
    ASSERT_EQ(matrix->k(), down ? kWidth : kHidden);
    for (const int64_t begin : {int64_t{0}, int64_t{3}}) {
      const auto out = rows_of(*matrix, begin, matrix->n() - begin);
      for (int64_t row = begin; row < matrix->n(); ++row) {
        for (int64_t column = 0; column < matrix->k(); ++column) {
          const int64_t index = down ? (expert * kWidth + column) * kHidden + row
                                     : (expert * kHidden + column) * 2 * kWidth + 2 * row + up;
          ASSERT_EQ(out[static_cast<size_t>((row - begin) * matrix->k() + column)],
                    static_cast<float>(index));
        }
      }
    }
  }
}

// Qwen3-MoE: [experts, out, in], gate rows before up rows.
TEST_F(SourceModels, FusedExpertsInHalves) {
  const auto model = list({{"l.mlp.experts.gate_up_proj", {DType::kF32, {2, 4, 3}, counted(24)}},
                           {"l.mlp.experts.down_proj", {DType::kF32, {2, 3, 2}, counted(12)}}},
                          R"({"text_config":{"model_type":"qwen3_moe","hidden_size":3}})");
  ASSERT_TRUE(model.ok()) << model.status().message();
  std::map<std::string, std::vector<float>> values;
  for (const auto& matrix : model->matrices) {
    values[matrix->module()] = rows_of(*matrix, 0, matrix->n());
  }
  EXPECT_EQ(values["l.mlp.experts.1.gate_proj"], (std::vector<float>{12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(values["l.mlp.experts.1.up_proj"], (std::vector<float>{18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(values["l.mlp.experts.0.down_proj"], (std::vector<float>{0, 1, 2, 3, 4, 5}));
}

TEST_F(SourceModels, FusedExpertsOfUnknownModelsStayAsTheyAre) {
  const std::map<std::string, Stored> tensors = {
      {"l.mlp.experts.gate_up_proj", {DType::kF32, {2, 4, 3}, {}}},
      {"norm.weight", {DType::kF32, {3}, {}}}};
  const auto model = list(tensors, R"({"model_type":"llama4","hidden_size":3})");
  ASSERT_TRUE(model.ok());
  EXPECT_TRUE(model->matrices.empty());
  EXPECT_EQ(model->others.size(), 2U);
  const auto wrong = list(tensors, R"({"model_type":"gpt_oss","hidden_size":5})");
  EXPECT_THAT(wrong.status().message(), testing::HasSubstr("hidden_size 5"));
}

TEST_F(SourceModels, ConfigsBesideTheModel) {
  const std::map<std::string, Stored> nvfp4 = {{"m.weight", {DType::kU8, {2, 16}, {}}},
                                               {"m.weight_scale", {DType::kF8E4M3, {2, 2}, {}}},
                                               {"m.weight_scale_2", {DType::kF32, {}, {1}}},
                                               {"m.input_scale", {DType::kF32, {}, {1}}},
                                               {"m.bias", {DType::kF32, {2}, {}}}};
  write_file("hf_quant_config.json",
             R"({"producer":{"name":"modelopt"},"quantization":{"quant_algo":"NVFP4"}})");
  auto model = list(nvfp4, "{}");
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->matrices[0]->format(), "NVFP4");
  EXPECT_EQ(model->matrices[0]->tensors().size(), 4U);
  ASSERT_EQ(model->others.size(), 1U);
  EXPECT_EQ(model->others[0]->name, "m.bias");
  write_file("hf_quant_config.json", "{}");
  EXPECT_THAT(list(nvfp4, "{}").status().message(), testing::HasSubstr("hf_quant_config.json"));
  std::filesystem::remove(folder_ / "hf_quant_config.json");
  write_file("quantize_config.json", R"({"bits":4,"group_size":-1,"sym":false})");
  model = list({{"m.qweight", {DType::kI32, {1, 8}, {}}},
                {"m.qzeros", {DType::kI32, {1, 1}, {}}},
                {"m.scales", {DType::kF16, {1, 8}, {}}}},
               "{}");
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->matrices[0]->format(), "GPTQ int4 per channel, zero points");
}

}  // namespace
}  // namespace nibble
