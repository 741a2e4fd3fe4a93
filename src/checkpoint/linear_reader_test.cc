#include "checkpoint/linear_reader.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/linear_slots.h"
#include "quant/codec.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

struct Stored {
  TensorPlan plan;
  std::string data;
};

/// What map_linear_weights() found, in memory of its own.
struct Linear {
  QuantTensor weight = {};  // [n, k]
  ActSpec act;
};

template <typename T>
std::string raw(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

bool same_bytes(const Buffer& a, const Buffer& b) {
  return std::ranges::equal(a.as<std::byte>(), b.as<std::byte>());
}

class LinearReader : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::vector<Stored>& tensors, int64_t shard_bytes = 1 << 20) {
    std::vector<TensorPlan> plan;
    plan.reserve(tensors.size());
    for (const Stored& tensor : tensors) {
      plan.push_back(tensor.plan);
    }
    auto writer = CheckpointWriter::create(folder_.string(), plan, shard_bytes).value();
    for (const Stored& tensor : tensors) {
      const auto bytes = std::as_bytes(std::span(tensor.data.data(), tensor.data.size()));
      ASSERT_TRUE(writer.write(tensor.plan.name, bytes).ok());
    }
    ASSERT_TRUE(writer.finish().ok());
  }

  Result<Linear> read(const QuantConfig& config, const std::string& module = "m") {
    NIBBLE_ASSIGN_OR_RETURN(const auto reader, CheckpointReader::open(folder_.string()));
    NIBBLE_ASSIGN_OR_RETURN(const auto mapped, map_linear_weights(reader, config, module));
    Linear linear{.act = mapped.act};
    NIBBLE_ASSIGN_OR_RETURN(linear.weight, copy_of(mapped.weight));
    return linear;
  }

  static QuantConfig config_of(std::string_view scheme) {
    const Json json = Json::object(
        {{"quantization_config", quant_config_json(find_scheme(scheme).value(), {"lm_head"})}});
    return read_quant_config(json, "").value();
  }

  fs::path folder_;
};

std::vector<float> decoded(const Linear& linear) {
  std::vector<float> out(static_cast<size_t>(linear.weight.n * linear.weight.k));
  for (int64_t row = 0; row < linear.weight.n; ++row) {
    decode_row(linear.weight, row, out.data() + row * linear.weight.k);
  }
  return out;
}

const std::vector<float> kEight = {-8, -7, -1, 0, 1, 2, 5, 7};
const std::vector<uint8_t> kEightPacked = {0x10, 0x87, 0xa9, 0xfd};

TEST_F(LinearReader, PackedChannel) {
  for (const bool narrow : {false, true}) {
    SetUp();
    write({{{"m.weight_packed", DType::kI32, {1, 1}}, raw(kEightPacked)},
           {{"m.weight_scale", DType::kF32, {1, 1}}, raw<float>({1})},
           {{"m.weight_shape", narrow ? DType::kI32 : DType::kI64, {2}},
            narrow ? raw<int32_t>({1, 8}) : raw<int64_t>({1, 8})}});
    const auto linear = read(config_of("w4a8"));
    ASSERT_TRUE(linear.ok()) << linear.status().message();
    EXPECT_EQ(linear->act.format, ActFormat::kInt8Token);
    EXPECT_EQ(decoded(*linear), kEight);
  }
}

TEST_F(LinearReader, PackedRowWithPaddingClearsIt) {
  write({{{"m.weight_packed", DType::kI32, {1, 1}}, raw<uint8_t>({0x10, 0xf7, 0xff, 0xff})},
         {{"m.weight_scale", DType::kBF16, {1, 1}}, raw<uint16_t>({0x3f80})},
         {{"m.weight_shape", DType::kI64, {2}}, raw<int64_t>({1, 3})}});
  const auto linear = read(config_of("w4a16_channel"));
  ASSERT_TRUE(linear.ok()) << linear.status().message();
  EXPECT_EQ(decoded(*linear), (std::vector<float>{-8, -7, -1}));
  const auto bytes = linear->weight.codes.as<uint8_t>();
  EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.end()),
            (std::vector<uint8_t>{0x10, 0x07, 0, 0}));
}

TEST_F(LinearReader, Int8WeightsAlonePackedAndInBytes) {
  const std::vector<float> values = {-128, -1, 0, 127, 5, -77};
  // Code + 128, rows padded to whole words; what stands there is of no account.
  write({{{"m.weight_packed", DType::kI32, {2, 1}},
          raw<uint8_t>({0x00, 0x7f, 0x80, 0xee, 0xff, 0x85, 0x33, 0xee})},
         {{"m.weight_scale", DType::kBF16, {2, 1}}, raw<uint16_t>({0x3f80, 0x3f80})},
         {{"m.weight_shape", DType::kI64, {2}}, raw<int64_t>({2, 3})}});
  const auto packed = read(config_of("w8a16_channel"));
  ASSERT_TRUE(packed.ok()) << packed.status().message();
  EXPECT_EQ(packed->act.format, ActFormat::kFloat);
  EXPECT_EQ(decoded(*packed), values);
  SetUp();
  write({{{"m.weight", DType::kI8, {2, 3}}, raw<int8_t>({-128, -1, 0, 127, 5, -77})},
         {{"m.weight_scale", DType::kF32, {2, 1}}, raw<float>({1, 1})}});
  const auto bytes = read(config_of("w8a16_channel"));
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  EXPECT_EQ(decoded(*bytes), values);
  SetUp();
  write({{{"m.weight_packed", DType::kI32, {2, 1}}, raw<uint32_t>({0, 0})},
         {{"m.weight_scale", DType::kBF16, {2, 1}}, raw<uint16_t>({0x3f80, 0x3f80})},
         {{"m.weight_shape", DType::kI64, {2}}, raw<int64_t>({2, 5})}});
  EXPECT_THAT(std::string(read(config_of("w8a16_channel")).status().message()),
              HasSubstr("holds 1 to 4 input channels, but m.weight_shape describes 5"));
}

TEST_F(LinearReader, UnpackedInt4) {
  write({{{"m.weight", DType::kI8, {1, 8}}, raw<int8_t>({-8, -7, -1, 0, 1, 2, 5, 7})},
         {{"m.weight_scale", DType::kF32, {1, 1}}, raw<float>({1})}});
  const auto linear = read(config_of("w4a8"));
  ASSERT_TRUE(linear.ok()) << linear.status().message();
  EXPECT_EQ(linear->weight.format.code, WeightCode::kInt4);
  EXPECT_EQ(decoded(*linear), kEight);
}

TEST_F(LinearReader, UnpackedInt4OutOfRange) {
  write({{{"m.weight", DType::kI8, {1, 2}}, raw<int8_t>({1, 8})},
         {{"m.weight_scale", DType::kF32, {1, 1}}, raw<float>({1})}});
  EXPECT_THAT(read(config_of("w4a8")).status().message(), HasSubstr("code 8 at [0, 1]"));
}

TEST_F(LinearReader, Fp8ChannelWithMisalignedData) {
  // One byte in front shifts nothing in the sorted file, so write the odd tensor first by rank.
  write({{{"a", DType::kF8E4M3, {3}}, "abc"},
         {{"m.weight", DType::kF8E4M3, {1, 4}}, raw<uint8_t>({0x38, 0xc0, 0x2a, 0x7e})},
         {{"m.weight_scale", DType::kF32, {1, 1}}, raw<float>({2})}});
  const auto linear = read(config_of("w8a8_fp8"));
  ASSERT_TRUE(linear.ok()) << linear.status().message();
  EXPECT_EQ(linear->act.format, ActFormat::kFp8Token);
  EXPECT_EQ(decoded(*linear), (std::vector<float>{2, -4, 0.625F, 896}));
}

TEST_F(LinearReader, TensorScaleIsRepeated) {
  write({{{"m.weight", DType::kI8, {2, 1}}, raw<int8_t>({3, -4})},
         {{"m.weight_scale", DType::kF32, {1}}, raw<float>({0.5F})}});
  const auto linear = read(config_of("w8a8_int8"));
  ASSERT_TRUE(linear.ok()) << linear.status().message();
  EXPECT_EQ(decoded(*linear), (std::vector<float>{1.5F, -2}));
}

TEST_F(LinearReader, NegativeAndZeroScalesAreNumbers) {
  write({{{"m.weight", DType::kI8, {2, 1}}, raw<int8_t>({3, -4})},
         {{"m.weight_scale", DType::kF32, {2, 1}}, raw<float>({-1, 0})}});
  const auto linear = read(config_of("w8a8_int8"));
  ASSERT_TRUE(linear.ok()) << linear.status().message();
  EXPECT_EQ(decoded(*linear), (std::vector<float>{-3, 0}));
}

TEST_F(LinearReader, RefusesNanScalesAndLeavesCodesToThePacker) {
  write({{{"m.weight", DType::kI8, {1, 1}}, raw<int8_t>({3})},
         {{"m.weight_scale", DType::kF32, {1, 1}},
          raw<float>({std::numeric_limits<float>::quiet_NaN()})},
         {{"f.weight", DType::kF8E4M3, {1, 1}}, raw<uint8_t>({0xff})},
         {{"f.weight_scale", DType::kF32, {1, 1}}, raw<float>({1})}});
  EXPECT_THAT(read(config_of("w8a8_int8")).status().message(),
              HasSubstr("model.safetensors: tensor m.weight_scale: scale 0 is nan"));
  EXPECT_TRUE(std::isnan(decoded(read(config_of("w8a8_fp8"), "f").value()).front()));
}

TEST_F(LinearReader, PlainWeightsWhateverTheConfigSays) {
  write({{{"m.weight", DType::kBF16, {1, 2}}, raw<uint16_t>({0x3f80, 0xc000})},
         {{"h.weight", DType::kF16, {1, 1}}, raw<uint16_t>({0x3c00})},
         {{"s.weight", DType::kF32, {1, 1}}, raw<float>({1.25F})}});
  const QuantConfig config = config_of("w4a16_g32");
  EXPECT_EQ(decoded(read(config).value()), (std::vector<float>{1, -2}));
  EXPECT_EQ(decoded(read(config, "h").value()), (std::vector<float>{1}));
  EXPECT_EQ(decoded(read(config, "s").value()), (std::vector<float>{1.25F}));
  EXPECT_EQ(read(config).value().act.format, ActFormat::kFloat);
}

TEST_F(LinearReader, RefusalsNameFileAndTensor) {
  write({{{"m.weight_packed", DType::kI32, {1, 4}}, std::string(16, 'x')},
         {{"m.weight_scale", DType::kBF16, {1, 2}}, raw<uint16_t>({0x3f80, 0x3f80})},
         {{"n.weight_packed", DType::kI32, {1, 4}}, std::string(16, 'x')},
         {{"z.weight_packed", DType::kI32, {1, 4}}, std::string(16, 'x')},
         {{"z.weight_scale", DType::kBF16, {1, 1}}, raw<uint16_t>({0x3f80})},
         {{"z.weight_zero_point", DType::kI32, {1, 1}}, std::string(4, 'x')},
         {{"w.weight_packed", DType::kI32, {1, 4}}, std::string(16, 'x')},
         {{"w.weight_shape", DType::kI64, {2}}, raw<int64_t>({2, 32})},
         {{"v.weight", DType::kF32, {4}}, std::string(16, 'x')}});
  const QuantConfig config = config_of("w4a16_g32");
  EXPECT_THAT(read(config).status().message(), HasSubstr("shape [1, 4] holds 25 to 32"));
  EXPECT_THAT(read(config, "n").status().message(), HasSubstr("n.weight_scale is missing"));
  EXPECT_THAT(read(config, "z").status().message(), HasSubstr("z.weight_zero_point"));
  EXPECT_THAT(read(config, "w").status().message(), HasSubstr("w.weight_scale is missing"));
  EXPECT_THAT(read(config, "v").status().message(), HasSubstr("expected a matrix, got shape [4]"));
  EXPECT_EQ(read(config, "absent").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(read(QuantConfig{}).status().message(), HasSubstr("no quantization_config"));
}

TEST_F(LinearReader, ScaleMayLiveInAnotherShard) {
  write({{{"m.weight", DType::kI8, {1, 4}}, raw<int8_t>({1, 2, 3, 4})},
         {{"m.weight_scale", DType::kF32, {1, 1}}, raw<float>({1})}},
        4);
  EXPECT_TRUE(fs::exists(folder_ / "model-00002-of-00002.safetensors"));
  EXPECT_EQ(decoded(read(config_of("w8a8_int8")).value()), (std::vector<float>{1, 2, 3, 4}));
}

TEST_F(LinearReader, ShardedCheckpointsFailClearly) {
  write({{{"a", DType::kU8, {4}}, "abcd"}, {{"b", DType::kU8, {4}}, "efgh"}}, 4);
  const auto message = [&] { return CheckpointReader::open(folder_.string()).status().message(); };
  ASSERT_TRUE(CheckpointReader::open(folder_.string()).ok());
  const fs::path index = folder_ / "model.safetensors.index.json";
  const auto rewrite = [&](const std::string& text) { std::ofstream(index) << text; };
  rewrite(R"({"weight_map":{"a":"model-00002-of-00002.safetensors",)"
          R"("b":"model-00002-of-00002.safetensors"}})");
  EXPECT_THAT(message(), HasSubstr("tensor a is said to be in"));
  rewrite(R"({"weight_map":{"a":"../x.safetensors"}})");
  EXPECT_THAT(message(), HasSubstr("not the name of a file"));
  rewrite(R"({"weight_map":7})");
  EXPECT_THAT(message(), HasSubstr("weight_map"));
  rewrite(R"({"weight_map":{"a":"model-00009-of-00002.safetensors"}})");
  EXPECT_THAT(message(), HasSubstr("model-00009-of-00002.safetensors of 1 is missing"));
  fs::remove_all(folder_);
  EXPECT_THAT(message(), HasSubstr("no such file"));
  fs::create_directories(folder_);
  EXPECT_THAT(message(), HasSubstr("holds neither"));
}

TEST_F(LinearReader, EverySchemeRoundTrips) {
  for (const QuantScheme& scheme : all_schemes()) {
    const bool shared =
        scheme.weight.scale_per == ScalePer::kTensor || scheme.weight.scale_per == ScalePer::kBlock;
    if (shared || scheme.weight.zero_points != ZeroPoints::kNone ||
        scheme.weight.scale_dtype == DType::kF8E8M0) {
      continue;  // slot_bytes() does not write these; LinearForms reads them
    }
    SetUp();
    auto weight = QuantTensor::allocate(scheme.weight, 3, 128).value();
    for (size_t i = 0; i < weight.codes.size(); ++i) {
      weight.codes.as<uint8_t>()[i] = static_cast<uint8_t>(i * 37 % 120);
    }
    for (float& scale : weight.scales.as<float>()) {
      scale = 0.75F;
    }
    std::vector<Stored> tensors;
    for (const TensorSlot& slot : linear_slots(scheme, 3, 128)) {
      const auto bytes = slot_bytes(slot, weight).value();
      tensors.push_back({{"m." + slot.suffix, slot.dtype, slot.shape},
                         std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())});
    }
    write(tensors);
    const QuantConfig config = scheme.weight.quantized() ? config_of(scheme.name) : QuantConfig{};
    const auto linear = read(config);
    ASSERT_TRUE(linear.ok()) << scheme.name << linear.status().message();
    EXPECT_EQ(linear->weight.format, scheme.weight) << scheme.name;
    const bool blocks = in_blocks(scheme.act);  // whose sidecar the loader reads
    EXPECT_EQ(linear->act.format, blocks ? ActFormat::kFloat : scheme.act) << scheme.name;
    EXPECT_TRUE(same_bytes(linear->weight.codes, weight.codes)) << scheme.name;
    EXPECT_TRUE(same_bytes(linear->weight.scales, weight.scales)) << scheme.name;
  }
}

}  // namespace
}  // namespace nibble
