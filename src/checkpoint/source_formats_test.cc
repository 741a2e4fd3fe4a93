#include "checkpoint/source_formats.h"

#include <bit>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/source_matrix.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

struct Stored {
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  std::string data;
};
using Tensors = std::map<std::string, Stored>;

std::string from_hex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); ++i) {
    if (hex[i] != ' ') {
      bytes.push_back(static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
      ++i;
    }
  }
  return bytes;
}

template <typename T>
std::string raw(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// A checkpoint in a folder of its own, with what list_source_matrices() says about it.
class Sources : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(testing::TempDir()) /
        (std::string("sources_") + testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const Tensors& tensors, int64_t shard_bytes = int64_t{1} << 30) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::vector<TensorPlan> plan;
    for (const auto& [name, tensor] : tensors) {
      plan.push_back({name, tensor.dtype, tensor.shape, 0});
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, shard_bytes).value();
    for (const auto& [name, tensor] : tensors) {
      ASSERT_TRUE(
          writer.write(name, std::as_bytes(std::span(tensor.data.data(), tensor.data.size()))).ok())
          << name;
    }
    ASSERT_TRUE(writer.finish().ok());
  }

  Result<SourceModel> list(const Json& config) {
    reader_ = std::make_unique<CheckpointReader>(CheckpointReader::open(folder_.string()).value());
    return list_source_matrices(*reader_, config);
  }

  // What is wrong with a checkpoint: of the listing, or else of the first rows that fail.
  Status status_of(const Tensors& tensors, const std::string& quantization_config) {
    write(tensors);
    Json config = Json::object({});
    if (!quantization_config.empty()) {
      config.set("quantization_config", Json::parse(quantization_config).value());
    }
    const auto model = list(config);
    if (!model.ok()) {
      return model.status();
    }
    for (const auto& matrix : model->matrices) {
      std::vector<float> out(static_cast<size_t>(matrix->n() * matrix->k()));
      NIBBLE_RETURN_IF_ERROR(matrix->decode(0, matrix->n(), out.data()));
    }
    return {};
  }

  fs::path folder_;
  std::unique_ptr<CheckpointReader> reader_;
};

std::vector<float> decoded(const SourceMatrix& matrix) {
  std::vector<float> out(static_cast<size_t>(matrix.n() * matrix.k()));
  const Status status = matrix.decode(0, matrix.n(), out.data());
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

Tensors tensors_of(const Json& json) {
  Tensors tensors;
  for (const auto& [name, value] : json.as_object()) {
    Stored& tensor = tensors[name];
    tensor.dtype = dtype_from_name(value.find("dtype")->as_string()).value();
    for (const Json& size : value.find("shape")->as_array()) {
      tensor.shape.push_back(size.as_int());
    }
    tensor.data = from_hex(value.find("hex")->as_string());
  }
  return tensors;
}

// Rows in pieces of every size, and whether touched() stays within the tensors.
void expect_values(const SourceMatrix& matrix, const std::string& values) {
  std::vector<float> expected(values.size() / 4);
  std::memcpy(expected.data(), values.data(), values.size());
  ASSERT_EQ(static_cast<int64_t>(expected.size()), matrix.n() * matrix.k());
  std::vector<float> out(expected.size());
  for (int64_t piece = 1; piece <= matrix.n(); ++piece) {
    for (int64_t row = 0; row < matrix.n(); row += piece) {
      const int64_t rows = std::min(piece, matrix.n() - row);
      const Status status = matrix.decode(row, rows, out.data());
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(same_bits(out.data(), expected.data() + row * matrix.k(), rows * matrix.k()))
          << "row " << row << " of " << matrix.n() << ", first " << out[0] << " instead of "
          << expected[static_cast<size_t>(row * matrix.k())];
      for (const auto& span : matrix.touched(row, rows)) {
        bool inside = false;
        for (const TensorInfo* tensor : matrix.tensors()) {
          inside =
              inside || (span.data() >= tensor->data.data() &&
                         span.data() + span.size() <= tensor->data.data() + tensor->data.size());
        }
        EXPECT_TRUE(inside && !span.empty());
      }
    }
  }
}

class Vectors : public Sources, public testing::WithParamInterface<const char*> {};

TEST_P(Vectors, AgreeBitForBit) {
  const Json cases = Json::parse(read_file(GetParam()).value()).value();
  for (const Json& item : cases.as_array()) {
    SCOPED_TRACE(item.find("name")->as_string());
    const Tensors tensors = tensors_of(*item.find("tensors"));
    for (const int64_t shard_bytes : {int64_t{1} << 30, int64_t{1}}) {  // one file, one per tensor
      write(tensors, shard_bytes);
      Json config = Json::object({{"quantization_config", *item.find("config")}});
      if (shard_bytes == 1) {
        config = Json::object({{"text_config", config}});
      }
      const auto model = list(config);
      ASSERT_TRUE(model.ok()) << model.status().message();
      EXPECT_TRUE(model->others.empty());
      const JsonObject& expected = item.find("matrices")->as_object();
      ASSERT_EQ(model->matrices.size(), expected.size());
      for (const auto& matrix : model->matrices) {
        SCOPED_TRACE(matrix->module() + ", " + matrix->format());
        const Json* values = expected.find(matrix->module());
        ASSERT_NE(values, nullptr);
        EXPECT_EQ(matrix->n(), values->find("n")->as_int());
        EXPECT_EQ(matrix->k(), values->find("k")->as_int());
        expect_values(*matrix, from_hex(values->find("hex")->as_string()));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats,
                         Vectors,
                         testing::Values("tests/data/formats/oracle_vectors.json",
                                         "tests/data/formats/package_vectors.json"));

// The examples of docs/formats.md, section by section.
class Examples : public Sources {
 protected:
  // Values of module "m".
  std::vector<float> values(const Tensors& tensors, const std::string& quantization_config) {
    write(tensors);
    const auto model =
        list(Json::object({{"quantization_config", Json::parse(quantization_config).value()}}));
    EXPECT_TRUE(model.ok()) << model.status().message();
    if (!model.ok() || model->matrices.size() != 1) {
      return {};
    }
    return decoded(*model->matrices[0]);
  }
};

std::string ct_weights(const std::string& weights) {
  return R"({"quant_method":"compressed-tensors","config_groups":{"group_0":{"targets":["Linear"],)"
         R"("weights":)" +
         weights + "}}}";
}
std::string quark_weights(const std::string& weight, const std::string& pack = "reorder") {
  return R"({"quant_method":"quark","global_quant_config":{"weight":)" + weight +
         R"(},"export":{"pack_method":")" + pack + R"("}})";
}
const std::string kCtGroup32 =
    ct_weights(R"({"num_bits":4,"type":"int","strategy":"group","group_size":32})");
const std::string kCtChannel4 = ct_weights(R"({"num_bits":4,"type":"int","strategy":"channel"})");
const std::string kCtFp8Channel =
    ct_weights(R"({"num_bits":8,"type":"float","strategy":"channel"})");
const std::string kQuarkChannel = R"({"dtype":"int4","qscheme":"per_channel","ch_axis":0})";
const std::string kQuarkStages =
    R"([{"dtype":"fp8_e4m3","qscheme":"per_tensor"},)" + kQuarkChannel + "]";
const std::string kGptq =
    R"({"quant_method":"gptq","bits":4,"group_size":-1,"sym":true,"checkpoint_format":"gptq"})";
const std::string kAwq = R"({"quant_method":"awq","bits":4,"group_size":-1,"version":"gemm"})";
const std::string kFp8 = R"({"quant_method":"fp8","weight_block_size":[128,128]})";
const std::string kMxfp4 = R"({"quant_method":"mxfp4"})";
const std::vector<float> kEight = {-8, -7, -1, 0, 1, 2, 5, 7};

std::vector<float> ramp() {
  std::vector<float> values;
  for (int i = 0; i < 32; ++i) {
    values.push_back(static_cast<float>(i - 16) / 8);
  }
  return values;
}

// Each value of the ramp as the codes of `levels` times the scale represent it best.
void expect_ramp(const std::vector<float>& values, float largest_error) {
  ASSERT_EQ(values.size(), 32U);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(values[i], ramp()[i], largest_error) << i;
  }
}

TEST_F(Examples, Section4CompressedTensors) {
  const Stored one{DType::kF32, {1, 1}, raw<float>({1})};
  EXPECT_EQ(values({{"m.weight_packed", {DType::kI32, {1, 1}, from_hex("10 87 a9 fd")}},
                    {"m.weight_scale", one}},
                   kCtChannel4),
            kEight);
  const auto ramp_of = [&](const char* scale, const char* packed) {
    return values({{"m.weight_packed", {DType::kI32, {1, 4}, from_hex(packed)}},
                   {"m.weight_scale", {DType::kBF16, {1, 1}, from_hex(scale)}},
                   {"m.weight_shape", {DType::kI64, {2}, raw<int64_t>({1, 32})}}},
                  kCtGroup32);
  };
  const auto wide = ramp_of("89 3e", "11 21 32 43 54 65 76 87 88 99 aa bb cc dd ee ff");
  expect_ramp(wide, 0.14F);
  EXPECT_EQ(wide[0], -7 * 0.267578125F);
  EXPECT_EQ(wide[31], 7 * 0.267578125F);
  const auto kimi = ramp_of("92 3e", "11 22 33 44 54 65 76 87 88 99 aa bb cc dc ed fe");
  expect_ramp(kimi, 0.144F);
  EXPECT_EQ(kimi[0], -7 * 0.28515625F);
}

TEST_F(Examples, Section4ZeroPointsAlongTheRows) {
  const std::string zeros = from_hex("0f 0f 0f 0f");  // rows alternate 7, -8
  const auto out =
      values({{"m.weight_packed", {DType::kI32, {8, 1}, std::string(32, '\x88')}},
              {"m.weight_scale", {DType::kF32, {8, 1}, raw(std::vector<float>(8, 0.5F))}},
              {"m.weight_zero_point", {DType::kI32, {1, 1}, zeros}}},
             ct_weights(R"({"num_bits":4,"symmetric":false,"strategy":"channel"})"));
  ASSERT_EQ(out.size(), 64U);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(out[i], i / 8 % 2 == 0 ? -3.5F : 4.0F);
  }
}

TEST_F(Examples, Section6Quark) {
  const Stored one{DType::kF32, {1}, raw<float>({1})};
  EXPECT_EQ(values({{"m.weight", {DType::kI32, {1, 1}, from_hex("f8 51 09 72")}},
                    {"m.weight_scale", one}},
                   quark_weights(kQuarkChannel)),
            kEight);
  EXPECT_EQ(values({{"m.weight", {DType::kI32, {1, 1}, from_hex("98 0f 21 75")}},
                    {"m.weight_scale", one}},
                   quark_weights(kQuarkChannel, "order")),
            kEight);
  const auto staged =
      values({{"m.weight",
               {DType::kI32, {1, 4}, from_hex("a8 bb a9 cb dc fe ed 0f 10 32 10 32 54 65 54 76")}},
              {"m.weight_scale", {DType::kF32, {}, from_hex("25 49 92 3b")}},
              {"m.weight_scale_2", {DType::kF32, {1}, from_hex("ef ee 6e 42")}}},
             quark_weights(kQuarkStages));
  expect_ramp(staged, 0.17F);
  EXPECT_EQ(staged[0], -8 * (0x1.24924ap-8F * 0x1.dddddep+5F));
}

// Quark's file-to-file conversion writes no metadata and packs single stages in order.
TEST_F(Examples, Section6QuarkWithoutMetadata) {
  fs::create_directories(folder_);
  std::string header = R"({"m.weight":{"dtype":"I32","shape":[1,1],"data_offsets":[0,4]},)"
                       R"("m.weight_scale":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  auto file = OutputFile::create((folder_ / "model.safetensors").string()).value();
  ASSERT_TRUE(file.write(raw<uint64_t>({header.size()})).ok());
  ASSERT_TRUE(file.write(header + from_hex("98 0f 21 75") + raw<float>({1})).ok());
  ASSERT_TRUE(file.finish().ok());
  const auto model = list(
      Json::object({{"quantization_config", Json::parse(quark_weights(kQuarkChannel)).value()}}));
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(decoded(*model->matrices[0]), kEight);
  EXPECT_THAT(model->matrices[0]->format(), HasSubstr("in order"));
}

TEST_F(Examples, Section7Gptq) {
  for (const auto& [version, zeros] :
       {std::pair("gptq", "77 77 77 77"), {"gptq_v2", "88 88 88 88"}}) {
    for (const char* symmetric : {"true", "false"}) {
      std::string words;
      for (int column = 0; column < 8; ++column) {
        words += from_hex("10 87 a9 fd");
      }
      const auto out =
          values({{"m.qweight", {DType::kI32, {1, 8}, words}},
                  {"m.qzeros", {DType::kI32, {1, 1}, from_hex(zeros)}},
                  {"m.scales", {DType::kF16, {1, 8}, raw(std::vector<uint16_t>(8, 0x3c00))}},
                  {"m.g_idx", {DType::kI32, {8}, raw(std::vector<int32_t>(8, 0))}}},
                 fmt::format(R"({{"quant_method":"gptq","bits":4,"group_size":-1,"sym":{},)"
                             R"("checkpoint_format":"{}"}})",
                             symmetric, version));
      ASSERT_EQ(out.size(), 64U);
      EXPECT_EQ(std::vector<float>(out.begin(), out.begin() + 8), kEight);
      EXPECT_EQ(std::vector<float>(out.end() - 8, out.end()), kEight);
    }
  }
}

TEST_F(Examples, Section8Awq) {
  const auto out =
      values({{"m.qweight", {DType::kI32, {1, 1}, from_hex("70 d9 81 fa")}},
              {"m.qzeros", {DType::kI32, {1, 1}, from_hex("88 88 88 88")}},
              {"m.scales", {DType::kF16, {1, 8}, raw(std::vector<uint16_t>(8, 0x3c00))}}},
             kAwq);
  EXPECT_EQ(out, kEight);  // eight rows of one column
}

TEST_F(Examples, Section9Mxfp4) {
  const char* const block = "ee de dd cc cc ab aa 89 00 21 22 43 44 54 55 66";
  const auto out =
      values({{"m.weight_packed", {DType::kU8, {1, 16}, from_hex(block)}},
              {"m.weight_scale", {DType::kU8, {1, 1}, from_hex("7e")}}},
             ct_weights(R"({"num_bits":4,"type":"float","strategy":"group","group_size":32})"));
  expect_ramp(out, 0.25F);
  EXPECT_EQ(out[0], -2);
  EXPECT_EQ(out[31], 2);
}

TEST_F(Examples, Section10Nvfp4) {
  const Stored codes{
      DType::kU8, {1, 16}, from_hex("ff ef ee de dd cc ab 9a 10 22 43 54 65 66 76 77")};
  const Stored scales{DType::kF8E4M3, {1, 2}, from_hex("7e 7d")};
  const auto ct = values(
      {{"m.weight_packed", codes},
       {"m.weight_scale", scales},
       {"m.weight_global_scale", {DType::kF32, {1}, from_hex("00 00 a8 44")}}},
      ct_weights(R"({"num_bits":4,"type":"float","strategy":"tensor_group","group_size":16})"));
  expect_ramp(ct, 0.34F);
  const auto modelopt = values({{"m.weight", codes},
                                {"m.weight_scale", scales},
                                {"m.weight_scale_2", {DType::kF32, {}, from_hex("31 0c 43 3a")}}},
                               R"({"quant_method":"modelopt","quant_algo":"NVFP4"})");
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_FLOAT_EQ(ct[i], modelopt[i]);
  }
}

TEST_F(Examples, Section11Fp8) {
  const auto block =
      values({{"m.weight", {DType::kF8E4M3, {3, 3}, from_hex("5e 66 7e 76 fe 66 7e 6e fe")}},
              {"m.weight_scale_inv",
               {DType::kF32, {2, 2}, from_hex("25 49 92 3c 25 49 92 3b b7 6d db 3b b7 6d 5b 3c")}}},
             R"({"quant_method":"fp8","fmt":"e4m3","weight_block_size":[2,2]})");
  const std::vector<float> expected = {0.5F, 1, 2, 4, -8, 0.25F, 3, 0.75F, -6};
  ASSERT_EQ(block.size(), 9U);
  for (size_t i = 0; i < 9; ++i) {
    EXPECT_NEAR(block[i], expected[i], 1e-6F);
  }
  EXPECT_EQ(values({{"m.weight", {DType::kF8E4M3, {1, 4}, from_hex("38 c0 2a 7e")}},
                    {"m.weight_scale", {DType::kF32, {1, 1}, raw<float>({1})}}},
                   kCtFp8Channel),
            (std::vector<float>{1, -2, 0.3125F, 448}));
}

}  // namespace
}  // namespace nibble
