#include "checkpoint/linear_repack.h"

#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "checkpoint/checkpoint_writer.h"
#include "quant/codec.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::string from_hex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

struct Linear {
  QuantTensor weight = {};
  ActFormat act = ActFormat::kFloat;
};

/// Cases of the oracle's vectors, loaded as the runtime does.
class LinearRepack : public testing::Test {
 protected:
  void SetUp() override {
    cases_ = Json::parse(read_file("tests/data/formats/oracle_vectors.json").value()).value();
    folder_ =
        fs::path(testing::TempDir()) /
        (std::string("repack_") + testing::UnitTest::GetInstance()->current_test_info()->name());
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

  Result<Linear> load(const Json& item) {
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
    const Json config = Json::object({{"quantization_config", *item.find("config")}});
    NIBBLE_ASSIGN_OR_RETURN(const QuantConfig quant, parse_quant_config(config, "config.json"));
    const auto reader = CheckpointReader::open(folder_.string()).value();
    NIBBLE_ASSIGN_OR_RETURN(const auto mapped, map_linear_weights(reader, quant, "m"));
    Linear linear{.act = mapped.act};
    NIBBLE_ASSIGN_OR_RETURN(linear.weight, copy_of(mapped.weight));
    return linear;
  }

  void expect_values(const std::string& name, const WeightFormat& format, ActFormat act) {
    SCOPED_TRACE(name);
    const Json& item = find(name);
    const auto linear = load(item);
    ASSERT_TRUE(linear.ok()) << linear.status().message();
    EXPECT_EQ(linear->weight.format, format);
    EXPECT_EQ(linear->act, act);
    const Json* expected = item.find("matrices")->find("m");
    ASSERT_EQ(linear->weight.n, expected->find("n")->as_int());
    ASSERT_EQ(linear->weight.k, expected->find("k")->as_int());
    std::vector<float> out(static_cast<size_t>(linear->weight.n * linear->weight.k));
    for (int64_t row = 0; row < linear->weight.n; ++row) {
      decode_row(linear->weight, row, out.data() + row * linear->weight.k);
    }
    const std::string values = from_hex(expected->find("hex")->as_string());
    ASSERT_EQ(values.size(), out.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(values.data(), out.data(), values.size()), 0);
  }

  Json cases_;
  fs::path folder_;
};

constexpr WeightFormat kChannel = {WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
constexpr WeightFormat kGroup32 = {WeightCode::kInt4, ScalePer::kGroup, 32, DType::kF32};

TEST_F(LinearRepack, QuarkStagesRunAsW4A8) {
  expect_values("quark w4a8 reorder", kChannel, ActFormat::kInt8Token);
  expect_values("quark w4a8 order", kChannel, ActFormat::kInt8Token);
}

TEST_F(LinearRepack, SymmetricGptqRunsInGroups) {
  expect_values("gptq sym", kGroup32, ActFormat::kFloat);
  expect_values("gptq_v2 sym", kGroup32, ActFormat::kFloat);
  expect_values("gptq that says v1 and stores v2 zeros", kGroup32, ActFormat::kFloat);
  expect_values("gptq one group", kChannel, ActFormat::kFloat);
}

TEST_F(LinearRepack, Fp8PerTensorRuns) {
  Json item = find("fp8 per tensor");
  Json config = *item.find("config");
  config.set("activation_scheme", "dynamic");
  item.set("config", config);
  const auto linear = load(item);
  ASSERT_TRUE(linear.ok()) << linear.status().message();
  EXPECT_EQ(linear->act, ActFormat::kFp8Token);
}

TEST_F(LinearRepack, OthersNameTheRemedy) {
  for (const char* name : {"gptq act-order", "gptq asym", "awq", "quark int4 channel reorder",
                           "quark int4 g32 reorder", "fp8 blocks", "modelopt nvfp4"}) {
    const auto linear = load(find(name));
    EXPECT_EQ(linear.status().code(), StatusCode::kUnsupported) << name;
    EXPECT_THAT(linear.status().message(), HasSubstr("nibble quantize SRC DST --scheme")) << name;
  }
}

}  // namespace
}  // namespace nibble
