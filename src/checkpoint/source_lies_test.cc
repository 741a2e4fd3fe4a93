#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
  std::string data;  // filled up with zero bytes
};
using Tensors = std::map<std::string, Stored>;

template <typename T>
std::string raw(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string weights_config(const std::string& weights) {
  return R"({"quant_method":"compressed-tensors","config_groups":{"group_0":{"targets":["Linear"],)"
         R"("weights":)" +
         weights + "}}}";
}

const std::string kGroup32 = weights_config(R"({"num_bits":4,"strategy":"group","group_size":32})");
const std::string kAsymmetric =
    weights_config(R"({"num_bits":4,"symmetric":false,"strategy":"group","group_size":32})");
const std::string kChannel4 = weights_config(R"({"num_bits":4,"strategy":"channel"})");
const std::string kInt8 = weights_config(R"({"num_bits":8,"strategy":"channel"})");
const std::string kCtFp8 = weights_config(R"({"num_bits":8,"type":"float","strategy":"channel"})");
const std::string kNvfp4 =
    weights_config(R"({"num_bits":4,"type":"float","strategy":"tensor_group","group_size":16})");
const std::string kMx =
    weights_config(R"({"num_bits":4,"type":"float","strategy":"group","group_size":32})");
const std::string kFp8 = R"({"quant_method":"fp8","weight_block_size":[128,128]})";
const std::string kGptq = R"({"quant_method":"gptq","bits":4,"group_size":32,"sym":true})";
const std::string kAwq = R"({"quant_method":"awq","bits":4,"group_size":32})";
const std::string kMxfp4 = R"({"quant_method":"mxfp4"})";
const std::string kQuark = R"({"quant_method":"quark","global_quant_config":{"weight":[)"
                           R"({"dtype":"fp8_e4m3","qscheme":"per_tensor"},)"
                           R"({"dtype":"int4","qscheme":"per_channel","symmetric":true}]}})";
const std::string kModelOpt = R"({"quant_method":"modelopt","quant_algo":"NVFP4"})";

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Good checkpoints of one matrix; tests spoil them.
const Tensors kCt = {{"m.weight_packed", {DType::kI32, {2, 8}, ""}},
                     {"m.weight_scale", {DType::kF32, {2, 2}, raw<float>({1, 2, 3, 4})}},
                     {"m.weight_shape", {DType::kI64, {2}, raw<int64_t>({2, 64})}}};
const Tensors kBlocks = {{"m.weight", {DType::kF8E4M3, {130, 140}, ""}},
                         {"m.weight_scale_inv", {DType::kF32, {2, 2}, ""}}};
const Tensors kGptqTensors = {{"m.qweight", {DType::kI32, {8, 8}, ""}},
                              {"m.qzeros", {DType::kI32, {2, 1}, std::string(8, '\x77')}},
                              {"m.scales", {DType::kF16, {2, 8}, ""}},
                              {"m.g_idx", {DType::kI32, {64}, ""}}};
const Tensors kAwqTensors = {{"m.qweight", {DType::kI32, {64, 1}, ""}},
                             {"m.qzeros", {DType::kI32, {2, 1}, ""}},
                             {"m.scales", {DType::kF16, {2, 8}, ""}}};
const Tensors kQuarkTensors = {{"m.weight", {DType::kI32, {2, 8}, ""}},
                               {"m.weight_scale", {DType::kF32, {}, raw<float>({1})}},
                               {"m.weight_scale_2", {DType::kF32, {2}, ""}}};
const Tensors kNvfp4Tensors = {{"m.weight_packed", {DType::kU8, {2, 32}, ""}},
                               {"m.weight_scale", {DType::kF8E4M3, {2, 4}, ""}},
                               {"m.weight_global_scale", {DType::kF32, {1}, raw<float>({2})}}};
const Tensors kExperts = {{"l.mlp.experts.gate_up_proj_blocks", {DType::kU8, {2, 4, 1, 16}, ""}},
                          {"l.mlp.experts.gate_up_proj_scales", {DType::kU8, {2, 4, 1}, ""}}};

struct Lie {
  const char* name;
  Tensors tensors;
  std::string config;  // quantization_config; empty: none
  std::function<void(Tensors&)> spoil;
  const char* tensor;     // that the message names
  const char* complaint;  // part of the message
};

void erase(Tensors& tensors, const char* name) { ASSERT_EQ(tensors.erase(name), 1U); }

std::vector<Lie> lies_of_compressed_tensors() {
  return {
      {"no config", kCt, "", [](Tensors&) {}, "m.weight_packed", "no quantization_config"},
      {"another method", kCt, kFp8, [](Tensors&) {}, "m.weight_packed", "another quant_method"},
      {"no scale", kCt, kGroup32, [](Tensors& t) { erase(t, "m.weight_scale"); }, "m.weight_packed",
       "m.weight_scale is missing"},
      {"no codes", kCt, kGroup32, [](Tensors& t) { erase(t, "m.weight_packed"); }, "m.weight_s",
       "belongs to no codes"},
      {"orphan zero points", kCt, kGroup32,
       [](Tensors& t) {
         t["n.weight_zero_point"] = {DType::kI32, {1, 2}, ""};
       },
       "n.weight_zero_point", "belongs to no codes"},
      {"zero points of symmetric weights", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_zero_point"] = {DType::kI32, {1, 2}, ""};
       },
       "m.weight_zero_point", "symmetric"},
      {"missing zero points", kCt, kAsymmetric, [](Tensors&) {}, "m.weight_packed",
       "m.weight_zero_point is missing"},
      {"zero points in the order of AWQ", kCt, kAsymmetric,
       [](Tensors& t) {
         t["m.weight_zero_point"] = {DType::kI32, {2, 1}, ""};
       },
       "m.weight_zero_point", "packed along the rows"},
      {"zero points of another type", kCt, kAsymmetric,
       [](Tensors& t) {
         t["m.weight_zero_point"] = {DType::kF32, {1, 2}, ""};
       },
       "m.weight_zero_point", "F32"},
      {"two weights", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight"] = {DType::kBF16, {2, 64}, ""};
       },
       "m.weight", "described twice"},
      {"words of another type", kCt, kGroup32,
       [](Tensors& t) { t["m.weight_packed"].dtype = DType::kF32; }, "m.weight_packed",
       "expected I32 or U8"},
      {"words of three dimensions", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_packed"].shape = {2, 4, 2};
       },
       "m.weight_packed", "expected a matrix"},
      {"too few words for the scales", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_packed"].shape = {2, 7};
       },
       "m.weight_packed", "describes 64"},
      {"scales of another type", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_scale"] = {DType::kI32, {2, 2}, ""};
       },
       "m.weight_scale", "scales of type I32"},
      {"scales of fewer rows", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_scale"].shape = {1, 2};
       },
       "m.weight_scale", "expected shape [2, 2]"},
      {"scales of a vector", kCt, kGroup32, [](Tensors& t) { t["m.weight_scale"].shape = {4}; },
       "m.weight_scale", "expected shape"},
      {"a NaN scale", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_scale"].data = raw<float>({1, 2, kNan, 4});
       },
       "m.weight_scale", "scale 2 is nan"},
      {"an infinite scale", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_scale"].data = raw<float>({1, 2, 3, -kInfinity});
       },
       "m.weight_scale", "scale 3 is -inf"},
      {"another weight_shape", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_shape"].data = raw<int64_t>({2, 60});
       },
       "m.weight_shape", "says [2, 60]"},
      {"a weight_shape of three", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_shape"] = {DType::kI64, {3}, ""};
       },
       "m.weight_shape", "expected two I32 or I64"},
      {"a channel's weight_shape that cannot be", kCt, kChannel4,
       [](Tensors& t) {
         t["m.weight_scale"] = {DType::kF32, {2, 1}, ""};
         t["m.weight_shape"].data = raw<int64_t>({2, 56});
       },
       "m.weight_packed", "describes 56"},
      {"a group index too short", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_g_idx"] = {DType::kI32, {32}, ""};
       },
       "m.weight_g_idx", "expected I32 [64]"},
      {"a group that does not exist", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_g_idx"] = {DType::kI32, {64}, raw(std::vector<int32_t>(64, 2))};
       },
       "m.weight_g_idx", "column 0 is in group 2"},
      {"a negative group", kCt, kGroup32,
       [](Tensors& t) {
         t["m.weight_g_idx"] = {DType::kI32, {64}, raw<int32_t>({0, -1})};
       },
       "m.weight_g_idx", "column 1 is in group -1"},
      {"columns that are no multiple of the group",
       {{"m.weight", {DType::kI8, {2, 40}, ""}}, {"m.weight_scale", {DType::kF32, {2, 2}, ""}}},
       kGroup32,
       [](Tensors&) {},
       "m.weight",
       "40 input channels are no multiple"},
      {"a 4-bit code in a byte that is none",
       {{"m.weight", {DType::kI8, {1, 32}, raw<int8_t>({1, 2, 8})}},
        {"m.weight_scale", {DType::kF32, {1, 1}, ""}}},
       kGroup32,
       [](Tensors&) {},
       "m.weight",
       "code 8 at [0, 2]"},
      {"bytes where floats are said to be",
       {{"m.weight", {DType::kI8, {2, 32}, ""}}, {"m.weight_scale", {DType::kF32, {2, 1}, ""}}},
       kCtFp8,
       [](Tensors&) {},
       "m.weight",
       "type float"},
      {"floats where integers are said to be",
       {{"m.weight", {DType::kF8E4M3, {2, 32}, ""}}, {"m.weight_scale", {DType::kF32, {2, 1}, ""}}},
       kInt8,
       [](Tensors&) {},
       "m.weight",
       "8-bit int"},
      {"scales of plain weights",
       {{"m.weight", {DType::kBF16, {2, 32}, ""}}, {"m.weight_scale", {DType::kF32, {2, 1}, ""}}},
       kInt8,
       [](Tensors&) {},
       "m.weight",
       "described twice"},
      {"no group that targets it", kCt,
       R"({"quant_method":"compressed-tensors","config_groups":{"g":{"targets":["re:lm_head"],)"
       R"("weights":{"num_bits":4}}}})",
       [](Tensors&) {}, "m.weight_packed", "no group of"},
      {"5-bit floats",
       {{"m.weight", {DType::kF8E5M2, {2, 2}, ""}}},
       "",
       [](Tensors&) {},
       "m.weight",
       "F8_E5M2"},
  };
}

std::vector<Lie> lies_of_floats() {
  return {
      {"both kinds of scales", kBlocks, kFp8,
       [](Tensors& t) {
         t["m.weight_scale"] = {DType::kF32, {2, 2}, ""};
       },
       "m.weight_scale_inv", "only one of them"},
      {"no scales", kBlocks, kFp8, [](Tensors& t) { erase(t, "m.weight_scale_inv"); }, "m.weight",
       "missing"},
      {"FP8 without config", kBlocks, "", [](Tensors&) {}, "m.weight", "no quantization_config"},
      {"blocks of another size", kBlocks, kFp8,
       [](Tensors& t) {
         t["m.weight_scale_inv"].shape = {3, 2};
       },
       "m.weight_scale_inv", "expected shape [2, 2]"},
      {"a NaN code", kBlocks, kFp8,
       [](Tensors& t) { t["m.weight"].data = std::string(145, '\x38') + "\xff"; }, "m.weight",
       "code at [1, 5] is NaN"},
      {"a NaN scale of a block", kBlocks, kFp8,
       [](Tensors& t) {
         t["m.weight_scale_inv"].data = raw<float>({1, 1, 1, kNan});
       },
       "m.weight_scale_inv", "scale 3 is nan"},
      {"a global scale of zero", kNvfp4Tensors, kNvfp4,
       [](Tensors& t) { t["m.weight_global_scale"].data = raw<float>({0}); },
       "m.weight_global_scale", "is zero"},
      {"a global scale of NaN", kNvfp4Tensors, kNvfp4,
       [](Tensors& t) { t["m.weight_global_scale"].data = raw<float>({kNan}); },
       "m.weight_global_scale", "is nan"},
      {"two global scales", kNvfp4Tensors, kNvfp4,
       [](Tensors& t) { t["m.weight_global_scale"].shape = {2}; }, "m.weight_global_scale",
       "expected one number"},
      {"a NaN block scale", kNvfp4Tensors, kNvfp4,
       [](Tensors& t) { t["m.weight_scale"].data = "\x38\x7f"; }, "m.weight_scale",
       "scale 1 is nan"},
      {"NVFP4 without global scale", kNvfp4Tensors, kNvfp4,
       [](Tensors& t) { erase(t, "m.weight_global_scale"); }, "m.weight_packed", "groups of 32"},
      {"MXFP4 with a global scale", kNvfp4Tensors, kMx, [](Tensors&) {}, "m.weight_packed",
       "groups of 16"},
      {"an E8M0 scale of 255",
       {{"m.weight_packed", {DType::kU8, {1, 16}, ""}},
        {"m.weight_scale", {DType::kU8, {1, 1}, "\xff"}}},
       kMx,
       [](Tensors&) {},
       "m.weight_scale",
       "scale 0 is nan"},
      {"ModelOpt without its second scale",
       {{"m.weight", {DType::kU8, {2, 32}, ""}}, {"m.weight_scale", {DType::kF8E4M3, {2, 4}, ""}}},
       kModelOpt,
       [](Tensors&) {},
       "m.weight",
       "m.weight_scale_2 is missing"},
      {"experts without scales", kExperts, kMxfp4,
       [](Tensors& t) { erase(t, "l.mlp.experts.gate_up_proj_scales"); },
       "l.mlp.experts.gate_up_proj_blocks", "missing"},
      {"scales without experts", kExperts, kMxfp4,
       [](Tensors& t) { erase(t, "l.mlp.experts.gate_up_proj_blocks"); },
       "l.mlp.experts.gate_up_proj_scales", "belongs to no codes"},
      {"experts without config", kExperts, "", [](Tensors&) {}, "l.mlp.experts.gate_up_proj_blocks",
       "no quantization_config"},
      {"an odd number of gate and up rows", kExperts, kMxfp4,
       [](Tensors& t) {
         t["l.mlp.experts.gate_up_proj_blocks"].shape = {2, 3, 1, 16};
       },
       "l.mlp.experts.gate_up_proj_blocks", "expected U8"},
      {"scales of fewer experts", kExperts, kMxfp4,
       [](Tensors& t) {
         t["l.mlp.experts.gate_up_proj_scales"].shape = {1, 4, 1};
       },
       "l.mlp.experts.gate_up_proj_scales", "expected U8 [2, 4, 1]"},
      {"blocks under the names of OpenAI",
       {{"block.0.mlp.mlp1_weight.blocks", {DType::kU8, {2, 4, 1, 16}, ""}}},
       kMxfp4,
       [](Tensors&) {},
       "block.0.mlp.mlp1_weight.blocks",
       "not read"},
      {"all experts in FP8",
       {{"l.mlp.experts.down_proj", {DType::kF8E4M3, {2, 4, 16}, ""}}},
       kFp8,
       [](Tensors&) {},
       "l.mlp.experts.down_proj",
       "not read"},
      {"experts stored twice", kExperts, kMxfp4,
       [](Tensors& t) {
         t["l.mlp.experts.1.up_proj.weight"] = {DType::kBF16, {2, 32}, ""};
       },
       "l.mlp.experts", "stored twice"},
  };
}

std::vector<Lie> lies_of_words() {
  return {
      {"GPTQ without config", kGptqTensors, "", [](Tensors&) {}, "m.qweight",
       "no quantization_config"},
      {"GPTQ without zero points", kGptqTensors, kGptq, [](Tensors& t) { erase(t, "m.qzeros"); },
       "m.qweight", "m.qzeros is missing"},
      {"GPTQ without scales", kGptqTensors, kGptq, [](Tensors& t) { erase(t, "m.scales"); },
       "m.qweight", "m.scales is missing"},
      {"GPTQ without codes", kGptqTensors, kGptq, [](Tensors& t) { erase(t, "m.qweight"); }, "m.",
       "belongs to no codes"},
      {"GPTQ scales of other groups", kGptqTensors, kGptq,
       [](Tensors& t) {
         t["m.scales"].shape = {1, 8};
       },
       "m.scales", "expected shape [2, 8]"},
      {"GPTQ zero points of other groups", kGptqTensors, kGptq,
       [](Tensors& t) {
         t["m.qzeros"].shape = {1, 1};
       },
       "m.qzeros", "expected I32 [2, 1]"},
      {"a symmetric zero point of 3", kGptqTensors, kGptq,
       [](Tensors& t) { t["m.qzeros"].data = "\x73\x77\x77\x77\x77\x77\x77\x77"; }, "m.qzeros",
       "zero point 3 of row 0, group 0"},
      {"a group of GPTQ that does not exist", kGptqTensors, kGptq,
       [](Tensors& t) {
         t["m.g_idx"].data = raw<int32_t>({0, 5});
       },
       "m.g_idx", "column 1 is in group 5"},
      {"GPTQ and plain", kGptqTensors, kGptq,
       [](Tensors& t) {
         t["m.weight"] = {DType::kF16, {8, 64}, ""};
       },
       "m.qweight", "described twice"},
      {"an infinite scale of GPTQ", kGptqTensors, kGptq,
       [](Tensors& t) {
         t["m.scales"].data = raw<uint16_t>({0, 0x7c00});
       },
       "m.scales", "scale 1 is inf"},
      {"AWQ with a group that does not divide", kAwqTensors, kAwq,
       [](Tensors& t) {
         t["m.qweight"].shape = {40, 1};
       },
       "m.qweight", "40 input channels"},
      {"AWQ zero points along the wrong axis", kAwqTensors, kAwq,
       [](Tensors& t) {
         t["m.qzeros"].shape = {1, 2};
       },
       "m.qzeros", "expected I32 [2, 1]"},
      {"Quark without the second stage", kQuarkTensors, kQuark,
       [](Tensors& t) { erase(t, "m.weight_scale_2"); }, "m.weight", "m.weight_scale_2 is missing"},
      {"Quark with a scale for each row in the first stage", kQuarkTensors, kQuark,
       [](Tensors& t) { t["m.weight_scale"].shape = {2}; }, "m.weight_scale",
       "expected one number"},
      {"Quark stages whose product is infinite", kQuarkTensors, kQuark,
       [](Tensors& t) {
         t["m.weight_scale"].data = raw<float>({1e30F});
         t["m.weight_scale_2"].data = raw<float>({1, 1e30F});
       },
       "m.weight_scale", "infinite"},
      {"Quark codes in bytes", kQuarkTensors, kQuark,
       [](Tensors& t) { t["m.weight"].dtype = DType::kI8; }, "m.weight", "contradict"},
  };
}

class Lies : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(testing::TempDir()) /
        (std::string("lies_") + testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The listing's failure, or that of decoding all matrices.
  Status status_of(const Tensors& tensors, const std::string& quantization_config) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::vector<TensorPlan> plan;
    for (const auto& [name, tensor] : tensors) {
      plan.push_back({name, tensor.dtype, tensor.shape, 0});
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, 1 << 30).value();
    for (const auto& [name, tensor] : tensors) {
      std::string data = tensor.data;
      data.resize(static_cast<size_t>(tensor_bytes(tensor.dtype, tensor.shape).value()));
      EXPECT_TRUE(writer.write(name, std::as_bytes(std::span(data.data(), data.size()))).ok());
    }
    EXPECT_TRUE(writer.finish().ok());
    Json config = Json::object({});
    if (!quantization_config.empty()) {
      config.set("quantization_config", Json::parse(quantization_config).value());
    }
    const auto reader = CheckpointReader::open(folder_.string()).value();
    const auto model = list_source_matrices(reader, config);
    NIBBLE_RETURN_IF_ERROR(model.status());
    for (const auto& matrix : model->matrices) {
      std::vector<float> out(static_cast<size_t>(matrix->n() * matrix->k()));
      NIBBLE_RETURN_IF_ERROR(matrix->decode(0, matrix->n(), out.data()));
    }
    return {};
  }

  void expect_refusals(const std::vector<Lie>& lies) {
    for (const Lie& lie : lies) {
      SCOPED_TRACE(lie.name);
      Tensors tensors = lie.tensors;
      lie.spoil(tensors);
      const Status status = status_of(tensors, lie.config);
      ASSERT_FALSE(status.ok());
      EXPECT_THAT(status.message(), AllOf(HasSubstr("model.safetensors: tensor "),
                                          HasSubstr(lie.tensor), HasSubstr(lie.complaint)));
    }
  }

  fs::path folder_;
};

TEST_F(Lies, OfCompressedTensorsAreRefused) { expect_refusals(lies_of_compressed_tensors()); }
TEST_F(Lies, OfFloatsAreRefused) { expect_refusals(lies_of_floats()); }
TEST_F(Lies, OfWordsAreRefused) { expect_refusals(lies_of_words()); }

// What the lies were made of is accepted, so that each refusal is about its own lie.
TEST_F(Lies, TheirTruthsAreAccepted) {
  const std::vector<std::pair<Tensors, std::string>> truths = {
      {kCt, kGroup32},         {kBlocks, kFp8},         {kGptqTensors, kGptq}, {kAwqTensors, kAwq},
      {kQuarkTensors, kQuark}, {kNvfp4Tensors, kNvfp4}, {kExperts, kMxfp4}};
  for (const auto& [tensors, config] : truths) {
    const Status status = status_of(tensors, config);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

// Infinities and NaN of plain weights are the encoder's affair.
TEST_F(Lies, PlainInfinitiesPass) {
  const Status status =
      status_of({{"m.weight", {DType::kF32, {1, 3}, raw<float>({kInfinity, kNan, 1})}}}, "");
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_F(Lies, OfConfigsAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"(7)", "not a JSON object"},
      {R"({})", "quant_method"},
      {R"({"quant_method":"bitsandbytes"})", "\"bitsandbytes\" is not read"},
      {R"({"quant_method":"gptq"})", "bits"},
      {R"({"quant_method":"gptq","bits":4,"checkpoint_format":"marlin"})", "marlin"},
      {R"({"quant_method":"gptq","bits":4,"pack_dtype":"int16"})", "pack_dtype"},
      {R"({"quant_method":"gptq","bits":4,"group_size":0})", "group_size"},
      {R"({"quant_method":"gptq","bits":4,"dynamic":{"+:lm":{"bits":8}}})", "dynamic"},
      {R"({"quant_method":"awq","bits":4,"version":"gemv"})", "gemv"},
      {R"({"quant_method":"awq","bits":4,"zero_point":false})", "zero_point"},
      {R"({"quant_method":"fp8","fmt":"e5m2"})", "e5m2"},
      {R"({"quant_method":"fp8","weight_block_size":[128]})", "weight_block_size"},
      {R"({"quant_method":"fp8","weight_block_size":[0,128]})", "weight_block_size"},
      {R"({"quant_method":"modelopt","quant_algo":"W4A8_AWQ"})", "W4A8_AWQ"},
      {R"({"quant_method":"quark","export":{"pack_method":"zigzag"}})", "zigzag"},
      {R"({"quant_method":"quark","layer_type_quant_config":{"Linear":{}}})", "layer_type"},
      {R"({"quant_method":"quark","global_quant_config":{"weight":{"dtype":"int3"}}})", "int3"},
      {R"({"quant_method":"quark","global_quant_config":{"weight":[1,2,3]}})", "3 stages"},
      {R"({"quant_method":"compressed-tensors"})", "config_groups"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},"transform_config":{"a":1}})",
       "transform_config"},
      {R"({"quant_method":"compressed-tensors","config_groups":{},)"
       R"("sparsity_config":{"format":"sparse-24"}})",
       "sparsity_config"},
      {weights_config(R"({"num_bits":3})"), "3-bit"},
      {weights_config(R"({"num_bits":4,"surprise":1})"), "surprise"},
      {weights_config(R"({"num_bits":4,"strategy":"attn_head"})"), "attn_head"},
      {weights_config(R"({"num_bits":4,"strategy":"group"})"), "group_size"},
      {weights_config(R"({"num_bits":8,"strategy":"block"})"), "block_structure"},
  };
  for (const auto& [config, complaint] : cases) {
    const Status status = status_of({{"m.weight", {DType::kF32, {1, 1}, ""}}}, config);
    ASSERT_FALSE(status.ok()) << config;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("config.json"), HasSubstr(complaint))) << config;
  }
}

}  // namespace
}  // namespace nibble
