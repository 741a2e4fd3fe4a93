#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/source_formats.h"
#include "quant/codec.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

std::string from_hex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

struct Linear {
  QuantTensor weight = {};
  ActSpec act;
};

/// Cases of the oracle's vectors, in the form that kernels take.
class LinearForms : public testing::Test {
 protected:
  void SetUp() override {
    cases_ = Json::parse(read_file("tests/data/formats/oracle_vectors.json").value()).value();
    folder_ =
        fs::path(testing::TempDir()) /
        (std::string("forms_") + testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { fs::remove_all(folder_); }

  const Json& find(std::string_view name) const {
    for (const Json& item : cases_.as_array()) {
      if (item.find("name")->as_string() == name) {
        return item;
      }
    }
    ADD_FAILURE() << "no case " << name;
    return cases_.as_array().front();
  }

  CheckpointReader write(const Json& item) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::vector<TensorPlan> plan;
    std::map<std::string, std::string> data;
    for (const auto& [name, tensor] : item.find("tensors")->as_object()) {
      std::vector<int64_t> shape;
      for (const Json& size : tensor.find("shape")->as_array()) {
        shape.push_back(size.as_int());
      }
      plan.push_back({name, dtype_from_name(tensor.find("dtype")->as_string()).value(), shape, 0});
      data[name] = from_hex(tensor.find("hex")->as_string());
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 20).value();
    for (const auto& [name, bytes] : data) {
      EXPECT_TRUE(writer.write(name, std::as_bytes(std::span(bytes.data(), bytes.size()))).ok());
    }
    EXPECT_TRUE(writer.finish().ok());
    return CheckpointReader::open(folder_.string()).value();
  }

  Result<Linear> load(const Json& item) {
    const CheckpointReader reader = write(item);
    NIBBLE_ASSIGN_OR_RETURN(const QuantConfig quant,
                            parse_quant_config(*item.find("config"), "config.json"));
    const SourceContext context{reader, quant};
    const TensorInfo* codes = nullptr;
    for (const char* suffix : {"weight_packed", "qweight", "weight"}) {
      codes = codes == nullptr ? context.find("m", suffix) : codes;
    }
    NIBBLE_ASSIGN_OR_RETURN(const CodedFacts facts, stored_facts(context, *codes, "m"));
    NIBBLE_ASSIGN_OR_RETURN(const MappedLinear mapped, map_coded(reader, facts));
    Linear linear{.act = mapped.act};
    NIBBLE_ASSIGN_OR_RETURN(linear.weight, copy_of(mapped.weight));
    return linear;
  }

  void expect_values(const Json& item) {
    const auto linear = load(item);
    ASSERT_TRUE(linear.ok()) << linear.status().message();
    const Json* expected = item.find("matrices")->find("m");
    const int64_t k = linear->weight.k;
    ASSERT_EQ(linear->weight.n, expected->find("n")->as_int());
    ASSERT_EQ(k, expected->find("k")->as_int());
    std::vector<float> out(static_cast<size_t>(linear->weight.n * k));
    std::vector<float> row(static_cast<size_t>(k));
    for (int64_t i = 0; i < linear->weight.n; ++i) {
      decode_row(linear->weight, i, row.data());
      for (int64_t j = 0; j < k; ++j) {
        const int64_t column =
            linear->act.columns == nullptr ? j : (*linear->act.columns)[static_cast<size_t>(j)];
        out[static_cast<size_t>(i * k + column)] = row[static_cast<size_t>(j)];
      }
    }
    const std::string values = from_hex(expected->find("hex")->as_string());
    ASSERT_EQ(values.size(), out.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(values.data(), out.data(), values.size()), 0);
  }

  Json cases_;
  fs::path folder_;
};

TEST_F(LinearForms, EveryFormHasTheValuesOfTheOracle) {
  int forms = 0;
  for (const Json& item : cases_.as_array()) {
    if (item.find("matrices")->find("m") != nullptr) {
      SCOPED_TRACE(item.find("name")->as_string());
      expect_values(item);
      ++forms;
    }
  }
  EXPECT_GE(forms, 38);
}

TEST_F(LinearForms, ExpertsInBlocksHaveTheValuesOfTheOracle) {
  const Json& item = find("mxfp4 of gpt-oss");
  const CheckpointReader reader = write(item);
  const QuantConfig quant = parse_quant_config(*item.find("config"), "config.json").value();
  const auto map = [&](const std::string& module) {
    return map_expert_weights(reader, quant, module, {});
  };
  size_t checked = 0;
  for (const auto& [module, expected] : item.find("matrices")->as_object()) {
    SCOPED_TRACE(module);
    const auto mapped = map(module);
    ASSERT_TRUE(mapped.ok()) << mapped.status().message();
    EXPECT_EQ(mapped->act.format, ActFormat::kFloat);
    const QuantTensor weight = copy_of(mapped->weight).value();
    ASSERT_EQ(weight.format,
              (WeightFormat{WeightCode::kFp4E2M1, ScalePer::kGroup, 32, DType::kF8E8M0}));
    std::vector<float> out(static_cast<size_t>(weight.n * weight.k));
    for (int64_t row = 0; row < weight.n; ++row) {
      decode_row(weight, row, out.data() + row * weight.k);
    }
    const std::string values = from_hex(expected.find("hex")->as_string());
    ASSERT_EQ(values.size(), out.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(values.data(), out.data(), values.size()), 0);
    ++checked;
  }
  EXPECT_EQ(checked, 6U);
  const Status none = map("model.layers.0.mlp.experts.2.gate_proj").status();
  EXPECT_EQ(none.code(), StatusCode::kCorrupt);
  EXPECT_THAT(none.message(), testing::HasSubstr("has 2 experts"));
  EXPECT_EQ(map("model.layers.1.mlp.experts.0.gate_proj").status().code(), StatusCode::kNotFound);
}

TEST_F(LinearForms, FormatsAreThoseOfKernels) {
  using enum WeightCode;
  using enum ScalePer;
  constexpr auto kZeros = ZeroPoints::kPerScale;
  const std::vector<std::pair<std::string, WeightFormat>> cases = {
      {"quark w4a8 reorder", {kInt4, kChannel, 0, DType::kF32}},
      {"gptq sym", {kInt4, kGroup, 32, DType::kF32}},
      {"gptq that says v1 and stores v2 zeros", {kInt4, kGroup, 32, DType::kF32}},
      {"gptq one group", {kInt4, kChannel, 0, DType::kF32}},
      {"gptq asym", {kInt4, kGroup, 32, DType::kF32, kZeros}},
      {"awq", {kInt4, kGroup, 32, DType::kF32, kZeros}},
      {"ct int8 packed g32 zero points", {kInt8, kGroup, 32, DType::kBF16, kZeros}},
      {"ct fp8 tensor", {kFp8E4M3, kChannel, 0, DType::kF32}},
      {"fp8 blocks", {kFp8E4M3, kBlock, 24, DType::kF32}},
      {"ct mxfp4", {kFp4E2M1, kGroup, 32, DType::kF8E8M0}},
      {"modelopt nvfp4", {kFp4E2M1, kGroup, 16, DType::kF32}},
  };
  for (const auto& [name, format] : cases) {
    const auto linear = load(find(name));
    ASSERT_TRUE(linear.ok()) << linear.status().message();
    EXPECT_EQ(linear->weight.format.code, format.code) << name;
    EXPECT_EQ(linear->weight.format.scale_per, format.scale_per) << name;
    EXPECT_EQ(linear->weight.format.group_size, format.group_size) << name;
    EXPECT_EQ(linear->weight.format.zero_points, format.zero_points) << name;
  }
}

TEST_F(LinearForms, ActOrderPutsColumnsIntoTheOrderOfTheirGroups) {
  for (const char* name : {"gptq act-order", "ct int4 act-order"}) {
    const auto linear = load(find(name));
    ASSERT_TRUE(linear.ok()) << linear.status().message();
    ASSERT_NE(linear->act.columns, nullptr) << name;
    std::vector<int32_t> sorted = *linear->act.columns;
    EXPECT_FALSE(std::ranges::is_sorted(sorted)) << name;
    std::ranges::sort(sorted);
    for (size_t i = 0; i < sorted.size(); ++i) {
      EXPECT_EQ(sorted[i], static_cast<int32_t>(i)) << name;
    }
  }
}

}  // namespace
}  // namespace nibble
