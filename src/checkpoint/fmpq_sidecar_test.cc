#include "checkpoint/fmpq_sidecar.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/source_matrix.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int64_t kRows = 3;
constexpr int64_t kInputs = 256;

class FmpqSidecarFile : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            fmt::format("{}_{}", testing::UnitTest::GetInstance()->current_test_info()->name(),
                        ::getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
    write_weights(0x21);
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] std::string folder() const { return root_.string(); }
  [[nodiscard]] std::string path(std::string_view name) const {
    return (root_ / std::string(name)).string();
  }

  /// Codes of one value, of three matrices that two sites read.
  void write_weights(int code) const {
    fs::remove(path("model.safetensors"));
    std::vector<TensorPlan> plan;
    for (const char* module : {"a", "b", "c"}) {
      plan.push_back({std::string(module) + ".weight_packed", DType::kI32, {kRows, kInputs / 8}});
      plan.push_back({std::string(module) + ".weight_scale", DType::kBF16, {kRows, kInputs / 32}});
    }
    auto writer = CheckpointWriter::create(folder(), plan, 1 << 20).value();
    for (const TensorPlan& tensor : plan) {
      const auto bytes = static_cast<size_t>(tensor_bytes(tensor.dtype, tensor.shape).value());
      ASSERT_TRUE(
          writer.write(tensor.name, std::vector<std::byte>(bytes, static_cast<std::byte>(code)))
              .ok());
    }
    ASSERT_TRUE(writer.finish().ok());
  }

  [[nodiscard]] CheckpointReader weights() const {
    return CheckpointReader::open(folder()).value();
  }

  static FmpqSidecar sidecar() {
    FmpqSidecar out;
    out.block = 32;
    out.permute = FmpqPermute::kGather;
    out.parts = 2;
    out.calibration = Json::object({{"tokens", 7}});
    out.kv = Json::object({{"format", "int4"}});
    out.sites.resize(2);
    out.sites[0].modules = {"a", "b"};
    out.sites[0].precision = {.block = 32, .bits = {8, 4, 4, 4, 4, 8, 4, 4}, .clip = 0.1F};
    out.sites[1].modules = {"c"};
    out.sites[1].precision = {.block = 32, .bits = {8, 8, 8, 4, 4, 4, 4, 4}, .clip = 1.0F};
    out.sites[0].split = true;
    out.sites[0].columns.resize(kInputs);
    std::iota(out.sites[0].columns.begin(), out.sites[0].columns.end(), 0);
    std::reverse(out.sites[0].columns.begin(), out.sites[0].columns.begin() + kInputs / 2);
    return out;
  }

  [[nodiscard]] Status read() const { return read_fmpq_sidecar(folder(), weights()).status(); }

  /// What reading says when the text of the good file is changed.
  [[nodiscard]] std::string read_changed(const std::string& from, const std::string& to) const {
    EXPECT_TRUE(write_fmpq_sidecar(sidecar(), weights(), folder()).ok());
    std::string text = read_file(path(kFmpqSidecarName)).value();
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from << text;
    text.replace(at, from.size(), to);
    std::ofstream(path(kFmpqSidecarName)) << text;
    return std::string(read().message());
  }

  /// What writing says of a changed one.
  [[nodiscard]] std::string write_changed(const std::function<void(FmpqSidecar&)>& change) const {
    FmpqSidecar changed = sidecar();
    change(changed);
    const Status written = write_fmpq_sidecar(changed, weights(), folder());
    EXPECT_FALSE(written.ok());
    EXPECT_FALSE(file_exists(path(kFmpqSidecarName)));
    return std::string(written.message());
  }

  fs::path root_;
};

TEST_F(FmpqSidecarFile, ComesBackAsItWas) {
  const FmpqSidecar written = sidecar();
  ASSERT_TRUE(write_fmpq_sidecar(written, weights(), folder()).ok());
  const auto read = read_fmpq_sidecar(folder(), weights());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->scales, written.scales);
  EXPECT_EQ(read->block, written.block);
  EXPECT_EQ(read->permute, written.permute);
  EXPECT_EQ(read->parts, written.parts);
  EXPECT_EQ(read->calibration.dump(), written.calibration.dump());
  EXPECT_EQ(read->kv.dump(), written.kv.dump());
  ASSERT_EQ(read->sites.size(), written.sites.size());
  for (size_t i = 0; i < written.sites.size(); ++i) {
    EXPECT_EQ(read->sites[i].modules, written.sites[i].modules);
    EXPECT_EQ(read->sites[i].precision, written.sites[i].precision);
    EXPECT_EQ(read->sites[i].columns, written.sites[i].columns);
    EXPECT_EQ(read->sites[i].split, written.sites[i].split);
  }
  EXPECT_EQ(read->find("b"), read->sites.data());
  EXPECT_EQ(read->find("d"), nullptr);
  EXPECT_DOUBLE_EQ(read->share_of_bits(4, weights()), (2 * 6.0 / 8 + 5.0 / 8) / 3);
  EXPECT_EQ(describe(*read, weights()),
            "blocks of 32, 70.8 % of their multiply-adds with 4-bit activations, gathered");
}

// Programs that read every .safetensors of a folder without an index would take the file for
// weights.
TEST_F(FmpqSidecarFile, WeightsInOneFileGetAnIndex) {
  ASSERT_TRUE(write_fmpq_sidecar(sidecar(), weights(), folder()).ok());
  const Json index = Json::parse(read_file(path("model.safetensors.index.json")).value()).value();
  const Json* map = index.find("weight_map");
  ASSERT_NE(map, nullptr);
  EXPECT_EQ(map->as_object().size(), 6U);
  EXPECT_EQ(map->find("c.weight_scale")->as_string(), "model.safetensors");
}

TEST_F(FmpqSidecarFile, OtherWeightsAreRefused) {
  ASSERT_TRUE(write_fmpq_sidecar(sidecar(), weights(), folder()).ok());
  write_weights(0x22);
  const Status status = read();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(),
              HasSubstr("nibble_fmpq.json: field weights_xxh64: belongs to other weights"));
  EXPECT_THAT(status.message(), HasSubstr("or run it with --ignore-fmpq"));
  EXPECT_THAT(read_changed("\"c\"", "\"e\""), HasSubstr("belongs to other weights: "));
}

TEST_F(FmpqSidecarFile, MissingFilesAreNamed) {
  EXPECT_EQ(read().code(), StatusCode::kNotFound);
  EXPECT_THAT(read().message(), HasSubstr("nibble_fmpq.json: is missing, which config.json"));
  ASSERT_TRUE(write_fmpq_sidecar(sidecar(), weights(), folder()).ok());
  fs::remove(path(kFmpqTensorsName));
  EXPECT_EQ(read().code(), StatusCode::kNotFound);
  EXPECT_THAT(read().message(), HasSubstr("nibble_fmpq.safetensors: is missing"));
}

TEST_F(FmpqSidecarFile, TensorsOfAnotherCalibrationAreRefused) {
  ASSERT_TRUE(write_fmpq_sidecar(sidecar(), weights(), folder()).ok());
  const std::string json = read_file(path(kFmpqSidecarName)).value();
  FmpqSidecar other = sidecar();
  std::swap(other.sites[1].precision.bits.front(), other.sites[1].precision.bits.back());
  ASSERT_TRUE(write_fmpq_sidecar(other, weights(), folder()).ok());
  std::ofstream(path(kFmpqSidecarName)) << json;
  EXPECT_EQ(read().code(), StatusCode::kCorrupt);
  EXPECT_THAT(read().message(), HasSubstr("field tensors_xxh64: nibble_fmpq.safetensors is not"));
  EXPECT_THAT(read().message(), HasSubstr("or run it with --ignore-fmpq"));
  // A file of before there was the field.
  const size_t at = json.find("\"tensors_xxh64\"");
  std::ofstream(path(kFmpqSidecarName))
      << json.substr(0, at) << json.substr(json.find("\"calibration\""));
  EXPECT_TRUE(read().ok()) << read().message();
}

TEST_F(FmpqSidecarFile, EveryRefusalSaysWhatToDo) {
  const auto remedy = HasSubstr("or run it with --ignore-fmpq");
  EXPECT_THAT(read_changed("\"block\": 32", "\"block\": \"32\""), remedy);
  EXPECT_THAT(read_changed("\"weights_xxh64\"", "\"weights\""), remedy);
  const std::string tensors = read_file(path(kFmpqTensorsName)).value();
  for (const size_t size : {size_t{0}, size_t{5}, size_t{40}, tensors.size() - 1}) {
    std::ofstream(path(kFmpqTensorsName)) << tensors.substr(0, size);
    EXPECT_FALSE(read().ok());
    EXPECT_THAT(read().message(), HasSubstr(std::string(kFmpqTensorsName)));
    EXPECT_THAT(read().message(), remedy);
  }
}

// Of routed experts, whose products take a part of a step's rows.
TEST_F(FmpqSidecarFile, RowsOfSitesMakeItVersion2) {
  FmpqSidecar written = sidecar();
  ASSERT_TRUE(write_fmpq_sidecar(written, weights(), folder()).ok());
  EXPECT_THAT(read_file(path(kFmpqSidecarName)).value(), HasSubstr("\"nibble_fmpq\": 1"));
  EXPECT_EQ(fmpq_config_json(written).dump(), R"({"version":1,"file":"nibble_fmpq.json"})");
  written.sites[1].rows = 0.0;
  ASSERT_TRUE(write_fmpq_sidecar(written, weights(), folder()).ok());
  EXPECT_THAT(read_file(path(kFmpqSidecarName)).value(), HasSubstr("\"nibble_fmpq\": 2"));
  EXPECT_EQ(fmpq_config_json(written).dump(), R"({"version":2,"file":"nibble_fmpq.json"})");
  const auto read = read_fmpq_sidecar(folder(), weights());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->sites[0].rows, 1);
  EXPECT_EQ(read->sites[1].rows, 0);
  EXPECT_NEAR(read->share_of_bits(4, weights()), 6.0 / 8, 1e-12);  // the first site's alone
  written.sites[1].rows = -0.25;
  EXPECT_THAT(write_fmpq_sidecar(written, weights(), folder()).message(), HasSubstr("field rows"));
}

TEST_F(FmpqSidecarFile, BlocksInBf16MakeItVersion3) {
  FmpqSidecar written = sidecar();
  written.scales = BlockScales::kWide;
  for (FmpqSidecar::Site& site : written.sites) {
    for (uint8_t& bits : site.precision.bits) {
      bits *= 2;
    }
  }
  ASSERT_TRUE(write_fmpq_sidecar(written, weights(), folder()).ok());
  const std::string text = read_file(path(kFmpqSidecarName)).value();
  EXPECT_THAT(text, HasSubstr("\"nibble_fmpq\": 3"));
  EXPECT_THAT(text, HasSubstr("\"form\": \"bf16\""));
  EXPECT_THAT(text, HasSubstr("\"bf16_share\": 0.2916"));
  const auto read = read_fmpq_sidecar(folder(), weights());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->act(), ActFormat::kBf16Blocks);
  EXPECT_EQ(read->sites[1].precision, written.sites[1].precision);
  EXPECT_EQ(describe(*read, weights()),
            "blocks of 32, 29.2 % of their multiply-adds with BF16 activations, gathered");
  written.sites[1].precision.bits[7] = 4;
  EXPECT_THAT(write_fmpq_sidecar(written, weights(), folder()).message(),
              HasSubstr("block 7 has 4, which is neither 8 nor 16"));
}

TEST_F(FmpqSidecarFile, RefusalsNameTheField) {
  EXPECT_THAT(read_changed("\"nibble_fmpq\": 1", "\"nibble_fmpq\": 4"),
              HasSubstr("field nibble_fmpq: is version 4, not 1 to 3"));
  EXPECT_THAT(read_changed("\"split\": false", "\"split\": false, \"rows\": 1.5"),
              HasSubstr("sites[1]: field rows: 1.5 is no share"));
  EXPECT_THAT(read_changed("\"block\": 32", "\"block\": 48"), HasSubstr("48 is none of 32, 64"));
  EXPECT_THAT(read_changed("\"block\": 32", "\"block\": 128"),
              HasSubstr("field bits: is U8 [8], but 256 inputs in blocks of 128 need U8 [2]"));
  EXPECT_THAT(read_changed("\"inputs\": 256", "\"inputs\": 250"),
              HasSubstr("sites[0]: field inputs: 250 is no multiple of the block 32"));
  EXPECT_THAT(read_changed("\"inputs\": 256", "\"inputs\": 288"), HasSubstr("need U8 [9]"));
  EXPECT_THAT(read_changed("\"clip\": 0.1", "\"clip\": 1.5"), HasSubstr("field clip: 1.5"));
  EXPECT_THAT(read_changed("\"gather\"", "\"spread\""), HasSubstr("\"spread\" is none of none"));
  EXPECT_THAT(read_changed("\"form\": \"block\"", "\"form\": \"row\""), HasSubstr("field form"));
  EXPECT_THAT(read_changed("\"parts\": 2", "\"parts\": 0"), HasSubstr("field parts: 0"));
  EXPECT_THAT(read_changed("\"parts\": 2", "\"parts\": 3"), HasSubstr("8 blocks cannot be shared"));
  EXPECT_THAT(read_changed("\"parts\": 2", "\"parts\": 4"), HasSubstr("blocks of 8 bits and part"));
  EXPECT_THAT(read_changed("\"b\"", "\"a\""), HasSubstr("a is named twice"));
  EXPECT_THAT(read_changed("\"modules\"", "\"moduls\""), HasSubstr("field modules: is missing"));
  EXPECT_THAT(read_changed("{", "["), HasSubstr("nibble_fmpq.json"));
  EXPECT_THAT(
      read_changed("\"gather\"", "\"fold\""),
      HasSubstr("no site reads nibble_fmpq.safetensors: tensor sites.0.columns where permute "
                "is \"fold\""));
}

TEST_F(FmpqSidecarFile, WhatCannotBeIsNotWritten) {
  EXPECT_THAT(write_changed([](auto& s) { s.sites[0].columns[3] = 5; }),
              HasSubstr("field columns: is no permutation of 256 inputs: entry"));
  EXPECT_THAT(write_changed([](auto& s) { s.sites[0].columns[3] = -1; }), HasSubstr("is -1"));
  EXPECT_THAT(write_changed([](auto& s) { s.sites[0].columns.pop_back(); }),
              HasSubstr("field columns: has 255 entries for 256 inputs"));
  EXPECT_THAT(write_changed([](auto& s) { s.sites[1].precision.bits[2] = 3; }),
              HasSubstr("block 2 has 3, which is neither 4 nor 8"));
  EXPECT_THAT(write_changed([](auto& s) { s.sites[0].precision.bits[7] = 8; }),
              HasSubstr("part 1 has 2 blocks of 8 bits and part 0 has 1"));
  EXPECT_THAT(write_changed([](auto& s) {
                std::swap(s.sites[0].columns.front(), s.sites[0].columns.back());
              }),
              HasSubstr("column 0 takes input 255 of another part"));
  EXPECT_THAT(write_changed([](auto& s) { s.sites[0].modules = {}; }), HasSubstr("no modules"));
}

TEST(FmpqConfig, AnnouncesTheSidecar) {
  EXPECT_FALSE(announces_fmpq(Json::parse("{}").value()).value());
  EXPECT_TRUE(announces_fmpq(Json::object({{std::string(kFmpqConfigField), fmpq_config_json({})}}))
                  .value());
  EXPECT_EQ(announces_fmpq(Json::parse(R"({"nibble_fmpq":3})").value()).status().code(),
            StatusCode::kCorrupt);
  EXPECT_EQ(
      announces_fmpq(Json::parse(R"({"nibble_fmpq":{"file":"a.json"}})").value()).status().code(),
      StatusCode::kUnsupported);
}

// Columns of gathered weights are not those of the model: nothing but a product knows them.
TEST_F(FmpqSidecarFile, GatheredWeightsAreNoSource) {
  const Json config =
      Json::parse(R"({"quantization_config":{"quant_method":"compressed-tensors","config_groups":{)"
                  R"("g":{"targets":["Linear"],"weights":{"num_bits":4,"strategy":"group",)"
                  R"("group_size":32},"input_activations":{"num_bits":8,"type":"int",)"
                  R"("strategy":"nibble_fmpq_gather","dynamic":true}}}}})")
          .value();
  const auto read = read_quant_config(config, folder());
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_TRUE(read->groups[0].activations.gathered);
  EXPECT_EQ(read->groups[0].activations.format, ActFormat::kFloat);
  EXPECT_THAT(list_source_matrices(weights(), config).status().message(),
              HasSubstr("quantize the model that this one was made from"));
}

}  // namespace
}  // namespace nibble
