#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/source_matrix.h"
#include "quantizer/quantize.h"
#include "synthetic/dummy.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kConfig = "bench/configs/kimi_k25.json";
const std::string kLayer = "language_model.model.layers.";

/// Type and shape of every tensor.
using Layout = std::map<std::string, std::pair<DType, std::vector<int64_t>>>;

Layout layout_of(const std::string& folder) {
  const CheckpointReader reader = CheckpointReader::open(folder).value();
  Layout layout;
  for (const TensorInfo* tensor : reader.tensors()) {
    layout[tensor->name] = {tensor->dtype, tensor->shape};
  }
  return layout;
}

Json config_of(const std::string& folder) {
  return Json::parse(read_file(folder + "/config.json").value()).value();
}

/// Kimi K2.5 with tiny widths, 6 experts and 3 layers, the first of them dense.
class DummyScheme : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            (std::string("dummy_scheme_") +
             testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
    Json config = Json::parse(read_file(kConfig).value()).value();
    Json& text = *config.as_object().find("text_config");
    text.set("n_routed_experts", 6);
    text.set("num_experts_per_tok", 2);
    text.set("vocab_size", 300);
    text.set("bos_token_id", 256);
    text.set("eos_token_id", 257);
    std::ofstream(path("in.json")) << config.dump();
  }
  void TearDown() override { fs::remove_all(root_); }

  [[nodiscard]] std::string path(const std::string& name) const { return (root_ / name).string(); }

  Result<DummyReport> make(const std::string& name, DummyOptions options) const {
    options.config = path("in.json");
    options.destination = path(name);
    options.layers = 3;
    options.widths = DummyWidths::kTiny;
    return make_dummy_checkpoint(options);
  }

  fs::path root_;
};

/// What the published checkpoint has of the routed experts of these widths: names, I32 words of
/// eight codes, a BF16 scale for 32 of them, and the shape.
void add_published(Layout& layout, const std::string& module, int64_t n, int64_t k, DType shape) {
  layout[module + ".weight_packed"] = {DType::kI32, {n, k / 8}};
  layout[module + ".weight_scale"] = {DType::kBF16, {n, k / 32}};
  layout[module + ".weight_shape"] = {shape, {2}};
}

Layout published_layout(DType shape) {
  Layout layout;
  const auto plain = [&](const std::string& name, std::vector<int64_t> dims) {
    layout[name + ".weight"] = {DType::kBF16, std::move(dims)};
  };
  plain("language_model.model.embed_tokens", {300, 64});
  plain("language_model.lm_head", {300, 64});
  plain("language_model.model.norm", {64});
  for (int layer = 0; layer < 3; ++layer) {
    const std::string at = kLayer + std::to_string(layer) + ".";
    plain(at + "input_layernorm", {64});
    plain(at + "post_attention_layernorm", {64});
    plain(at + "self_attn.q_a_proj", {64, 64});
    plain(at + "self_attn.q_a_layernorm", {64});
    plain(at + "self_attn.q_b_proj", {2 * 24, 64});
    plain(at + "self_attn.kv_a_proj_with_mqa", {32 + 8, 64});
    plain(at + "self_attn.kv_a_layernorm", {32});
    plain(at + "self_attn.kv_b_proj", {2 * 48, 32});
    plain(at + "self_attn.o_proj", {64, 2 * 32});
    const std::string shared = layer == 0 ? "mlp." : "mlp.shared_experts.";
    plain(at + shared + "gate_proj", {64, 64});
    plain(at + shared + "up_proj", {64, 64});
    plain(at + shared + "down_proj", {64, 64});
    if (layer == 0) {
      continue;
    }
    plain(at + "mlp.gate", {6, 64});
    layout[at + "mlp.gate.e_score_correction_bias"] = {DType::kF32, {6}};
    for (int expert = 0; expert < 6; ++expert) {
      const std::string module = at + "mlp.experts." + std::to_string(expert) + ".";
      add_published(layout, module + "gate_proj", 64, 64, shape);
      add_published(layout, module + "up_proj", 64, 64, shape);
      add_published(layout, module + "down_proj", 64, 64, shape);
    }
  }
  return layout;
}

TEST_F(DummyScheme, TheConfigsOwnFormHasThePublishedLayout) {
  const auto report = make("published", {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(layout_of(path("published")), published_layout(DType::kI32));
  EXPECT_EQ(report->layers, 3);
  EXPECT_EQ(report->tensors, std::ssize(published_layout(DType::kI32)));
  const Json config = config_of(path("published"));
  EXPECT_EQ(config.find("quantization_config"), nullptr);
  const Json* nested = config.find("text_config")->find("quantization_config");
  ASSERT_NE(nested, nullptr);
  EXPECT_EQ(nested->find("format")->as_string(), "pack-quantized");
}

// Only the type of weight_shape differs: compressed-tensors writes I64, the published file has I32.
TEST_F(DummyScheme, QuantizeGivesThePublishedLayout) {
  ASSERT_TRUE(make("plain", {.dtype = DType::kBF16}).ok());
  QuantizeOptions options{.source = path("plain"), .destination = path("quantized")};
  options.plan.rules.scheme = find_scheme("w4a16_g32").value();
  const auto report = quantize_checkpoint(options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(layout_of(path("quantized")), published_layout(DType::kI64));
}

// Deviation of all weights of a matrix, in units of 0.02; rows have scales of 0.7 to 1.4 times it.
double deviation(const SourceMatrix& matrix) {
  std::vector<float> x(static_cast<size_t>(matrix.n() * matrix.k()));
  EXPECT_TRUE(matrix.decode(0, matrix.n(), x.data()).ok());
  double squares = 0;
  for (const float value : x) {
    squares += (value / 0.02) * (value / 0.02);
  }
  return std::sqrt(squares / static_cast<double>(x.size()));
}

// The same tensors and the same config as those that quantize makes of a plain one, whose weights
// are as large.
TEST_F(DummyScheme, SchemesAreStoredAsQuantizeStoresThem) {
  ASSERT_TRUE(make("plain", {.dtype = DType::kBF16}).ok());
  for (const char* name : {"w4a8", "w8a8_fp8", "w8a8_fp8_expert", "w8a8_fp8_block", "w4a16_g32",
                           "w4a16_channel", "w8a8_int8", "w8a16_channel", "mxfp4", "mxfp4_fp8"}) {
    SCOPED_TRACE(name);
    const QuantScheme scheme = find_scheme(name).value();
    QuantizeOptions options{.source = path("plain"), .destination = path("quantized")};
    options.plan.rules.scheme = scheme;
    options.existing = ExistingOutput::kReplace;
    ASSERT_TRUE(quantize_checkpoint(options).ok());
    const auto made = make("made", {.scheme = scheme, .existing = ExistingOutput::kReplace});
    ASSERT_TRUE(made.ok()) << made.status().message();
    EXPECT_EQ(layout_of(path("made")), layout_of(path("quantized")));
    const Json config = config_of(path("made"));
    const Json quantized = config_of(path("quantized"));
    EXPECT_EQ(config.find("text_config")->find("quantization_config"), nullptr);
    EXPECT_EQ(config.find("quantization_config")->dump(),
              quantized.find("quantization_config")->dump());
    const CheckpointReader reader = CheckpointReader::open(path("made")).value();
    const SourceModel model = list_source_matrices(reader, config).value();
    for (const auto& matrix : model.matrices) {
      if (matrix->module() == kLayer + "1.mlp.experts.5.up_proj") {
        EXPECT_NEAR(deviation(*matrix), 1, 0.45);
      }
    }
  }
}

TEST_F(DummyScheme, RefusesFormsWhoseCodesAreNotIndependent) {
  const auto zero_points = make("made", {.scheme = find_scheme("w4a16_g32_asym").value()});
  EXPECT_EQ(zero_points.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(zero_points.status().message(), HasSubstr("--dtype bf16"));
  const auto group = make("made", {.scheme = find_scheme("w4a16_g128").value()});
  EXPECT_THAT(group.status().message(), HasSubstr("no multiple of the group size 128"));
}

}  // namespace
}  // namespace nibble
