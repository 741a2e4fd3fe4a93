#include "quantizer/quantize.h"

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/linear_reader.h"
#include "checkpoint/source_matrix.h"
#include "quant/codec.h"
#include "quantizer/encoder.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int64_t kN = 48;
constexpr int64_t kK = 128;

class Quantize : public testing::Test {
 protected:
  void SetUp() override {
    root_ =
        fs::path(testing::TempDir()) /
        (std::string("quantize_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_ / "src");
    std::ofstream(root_ / "src/tokenizer.json") << "{\"t\":1}";
    std::ofstream(root_ / "src/notes.bin") << "not copied";
    std::ofstream(root_ / "src/config.json")
        << R"({"architectures":["X"],"text_config":{"hidden_size":128},"eps":1e-05})";
    write_model(0.5F);
  }
  void TearDown() override { fs::remove_all(root_); }

  void write_model(float special) {
    std::vector<TensorPlan> plan;
    for (const char* name :
         {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
          "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
          "model.layers.1.mlp.down_proj.weight", "lm_head.weight"}) {
      plan.push_back({name, DType::kF32, {kN, kK}, 0});
    }
    plan.push_back({"model.norm.weight", DType::kF32, {kK}, 0});
    for (const std::string& name : kv_scales_) {
      plan.push_back({name, DType::kF32, {1}, 0});
    }
    for (const auto& entry : fs::directory_iterator(root_ / "src")) {
      if (entry.path().string().find("model") != std::string::npos) {
        fs::remove(entry.path());
      }
    }
    auto writer = CheckpointWriter::create((root_ / "src").string(), plan, 40000).value();
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (const TensorPlan& tensor : plan) {
      std::vector<float> values(
          static_cast<size_t>(tensor_bytes(DType::kF32, tensor.shape).value() / 4));
      for (float& value : values) {
        value = normal(random);
      }
      if (tensor.name.find("q_proj") != std::string::npos) {
        values[kK + 7] = special;
      }
      ASSERT_TRUE(writer.write(tensor.name, std::as_bytes(std::span(values))).ok());
    }
    ASSERT_TRUE(writer.finish().ok());
  }

  QuantizeOptions options(std::string_view scheme = "w4a16_g32") const {
    QuantizeOptions result;
    result.source = (root_ / "src").string();
    result.destination = destination();
    result.plan.rules.scheme = find_scheme(scheme).value();
    result.threads = 2;
    return result;
  }
  std::string destination() const { return (root_ / "out").string(); }
  size_t work_folders() const {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(root_)) {
      count += entry.path().string().find(".partial") != std::string::npos ? 1 : 0;
    }
    return count;
  }

  fs::path root_;
  std::vector<std::string> kv_scales_;
};

TEST_F(Quantize, EverySchemeIsReadBackCloseToTheSource) {
  const auto source = CheckpointReader::open(options().source).value();
  for (const QuantScheme& scheme : all_schemes()) {
    if (!scheme.weight.quantized()) {
      continue;
    }
    if (in_blocks(scheme.act)) {  // weights alone do not tell the blocks
      EXPECT_THAT(quantize_checkpoint(options(scheme.name)).status().message(),
                  HasSubstr("give one with --calibrate TEXT"));
      continue;
    }
    QuantizeOptions wanted = options(scheme.name);
    wanted.existing = ExistingOutput::kReplace;
    const auto report = quantize_checkpoint(wanted);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_EQ(report->tensors.size(), 3U);
    EXPECT_LE(report->tensors[0].snr_db, report->tensors[2].snr_db);
    const auto output = CheckpointReader::open(destination()).value();
    const Json config = Json::parse(read_file(destination() + "/config.json").value()).value();
    const std::string module = "model.layers.1.mlp.down_proj";
    const auto stored = list_source_matrices(output, config);
    ASSERT_TRUE(stored.ok()) << scheme.name << stored.status().message();
    const SourceMatrix* matrix = nullptr;
    for (const auto& candidate : stored->matrices) {
      matrix = candidate->module() == module ? candidate.get() : matrix;
    }
    ASSERT_NE(matrix, nullptr) << scheme.name;
    const auto* original =
        reinterpret_cast<const float*>(source.require(module + ".weight").value()->data.data());
    QuantError error;
    std::vector<float> row(kK);
    for (int64_t i = 0; i < kN; ++i) {
      ASSERT_TRUE(matrix->decode(i, 1, row.data()).ok());
      for (int64_t j = 0; j < kK; ++j) {
        const double w = original[i * kK + j];
        const double d = w - row[static_cast<size_t>(j)];
        error.signal += w * w;
        error.noise += d * d;
      }
    }
    EXPECT_NEAR(
        error.snr_db(),
        [&] {
          for (const QuantizedTensor& tensor : report->tensors) {
            if (tensor.name == module) {
              return tensor.snr_db;
            }
          }
          return 0.0;
        }(),
        1e-6)
        << scheme.name;
  }
}

TEST_F(Quantize, PassesOtherTensorsAndFilesByteForByte) {
  ASSERT_TRUE(quantize_checkpoint(options()).ok());
  const auto source = CheckpointReader::open(options().source).value();
  const auto output = CheckpointReader::open(destination()).value();
  for (const char* name : {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight",
                           "lm_head.weight", "model.norm.weight"}) {
    const TensorInfo* before = source.require(name).value();
    const TensorInfo* after = output.require(name).value();
    ASSERT_EQ(before->data.size(), after->data.size()) << name;
    EXPECT_EQ(std::memcmp(before->data.data(), after->data.data(), before->data.size()), 0);
  }
  EXPECT_EQ(read_file(destination() + "/tokenizer.json").value(), "{\"t\":1}");
  EXPECT_FALSE(file_exists(destination() + "/notes.bin"));
  const std::string config = read_file(destination() + "/config.json").value();
  EXPECT_THAT(config, HasSubstr("1e-05"));
  EXPECT_THAT(config, HasSubstr("\"lm_head\""));
  EXPECT_THAT(config, HasSubstr("\"model.layers.0.mlp.gate\""));
  EXPECT_EQ(work_folders(), 0U);
}

TEST_F(Quantize, KeepsScalesOfTheCacheAndAnnouncesThem) {
  kv_scales_ = {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_proj.v_scale"};
  write_model(0.5F);
  const auto announced = [&](const QuantizeOptions& wanted) {
    const auto report = quantize_checkpoint(wanted);
    CHECK_MSG(report.ok(), "{}", report.status().message());
    const auto source = CheckpointReader::open(wanted.source).value();
    const auto output = CheckpointReader::open(destination()).value();
    for (const std::string& name : kv_scales_) {
      const TensorInfo* before = source.require(name).value();
      const TensorInfo* after = output.require(name).value();
      CHECK_EQ(after->data.size(), size_t{4});
      EXPECT_EQ(std::memcmp(before->data.data(), after->data.data(), 4), 0);
    }
    const Json config = Json::parse(read_file(destination() + "/config.json").value()).value();
    const Json* scheme = config.find("text_config")->find("quantization_config");
    scheme = scheme == nullptr ? config.find("quantization_config") : scheme;
    scheme = scheme->find("kv_cache_scheme");
    return scheme == nullptr ? "no field" : scheme->dump();
  };
  QuantizeOptions wanted = options();
  wanted.existing = ExistingOutput::kReplace;
  EXPECT_EQ(announced(wanted),
            R"({"num_bits":8,"type":"float","symmetric":true,"strategy":"tensor",)"
            R"("dynamic":false})");
  wanted.plan.kv_cache = KvCacheScheme::kNone;
  EXPECT_EQ(announced(wanted), "null");
  wanted.plan.rules.scheme = find_scheme("w8a8_fp8_block").value();
  wanted.plan.dialect = Dialect::kFp8;
  wanted.plan.kv_cache.reset();
  EXPECT_EQ(announced(wanted), "no field");
  kv_scales_.clear();
  write_model(0.5F);
  wanted = options("w8a8_int8");
  wanted.existing = ExistingOutput::kReplace;
  EXPECT_EQ(announced(wanted), "null");
}

TEST_F(Quantize, DoesNotDependOnThreads) {
  QuantizeOptions one = options();
  one.threads = 1;
  QuantizeOptions four = options();
  four.threads = 4;
  four.destination += "4";
  ASSERT_TRUE(quantize_checkpoint(one).ok());
  ASSERT_TRUE(quantize_checkpoint(four).ok());
  EXPECT_EQ(read_file(one.destination + "/model.safetensors").value(),
            read_file(four.destination + "/model.safetensors").value());
}

TEST_F(Quantize, HonoursIgnoreAndInclude) {
  QuantizeOptions wanted = options();
  wanted.plan.rules.ignore = {"re:.*experts.*"};
  wanted.plan.rules.include = {"lm_head"};
  ASSERT_TRUE(quantize_checkpoint(wanted).ok());
  const auto output = CheckpointReader::open(destination()).value();
  EXPECT_NE(output.find("lm_head.weight_packed"), nullptr);
  EXPECT_NE(output.find("model.layers.0.mlp.experts.0.up_proj.weight"), nullptr);
  wanted.plan.rules.ignore = {"no.such.module"};
  wanted.existing = ExistingOutput::kReplace;
  EXPECT_THAT(quantize_checkpoint(wanted).status().message(), HasSubstr("no.such.module"));
}

TEST_F(Quantize, Refusals) {
  ASSERT_TRUE(quantize_checkpoint(options()).ok());
  EXPECT_TRUE(quantize_checkpoint(options()).value().already_there);
  EXPECT_EQ(quantize_checkpoint(options("w8a8_int8")).status().code(), StatusCode::kAlreadyExists);
  QuantizeOptions same = options();
  same.destination = same.source;
  EXPECT_EQ(quantize_checkpoint(same).status().code(), StatusCode::kInvalidArgument);
  QuantizeOptions plain = options("bf16");
  plain.destination += "3";
  EXPECT_EQ(quantize_checkpoint(plain).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(Quantize, RefusesWeightsThatAreNotNumbersAndLeavesNothing) {
  write_model(std::numeric_limits<float>::quiet_NaN());
  const auto report = quantize_checkpoint(options());
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), StatusCode::kCorrupt);
  EXPECT_THAT(report.status().message(), HasSubstr("q_proj.weight: weight [1, 7] is nan"));
  EXPECT_FALSE(file_exists(destination()));
  EXPECT_EQ(work_folders(), 0U);
}

TEST_F(Quantize, FullDiskIsACleanError) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{20000, 20000};  // bytes in a file: writing beyond fails like a full disk
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto report = quantize_checkpoint(options());
    ::_exit(report.ok() ? 1 : exit_code(report.status().code()));
  }
  int state = 0;
  ::waitpid(child, &state, 0);
  EXPECT_EQ(WEXITSTATUS(state), exit_code(StatusCode::kResourceExhausted));
  EXPECT_FALSE(file_exists(destination()));
  EXPECT_EQ(work_folders(), 1U);  // to be continued
  EXPECT_TRUE(quantize_checkpoint(options()).ok());
  EXPECT_EQ(work_folders(), 0U);
}

TEST_F(Quantize, KilledAnywhereLeavesTheWholeOutputOrNone) {
  std::mt19937 random(5);
  size_t whole = 0;
  size_t none = 0;
  for (int round = 0; round < 30; ++round) {
    fs::remove_all(destination());
    const pid_t child = ::fork();
    if (child == 0) {
      ::_exit(quantize_checkpoint(options()).ok() ? 0 : 1);
    }
    ::usleep(static_cast<useconds_t>(random() % 60000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    if (!file_exists(destination())) {
      ++none;
      continue;
    }
    ++whole;
    const auto output = CheckpointReader::open(destination());
    ASSERT_TRUE(output.ok()) << output.status().message();
    EXPECT_EQ(output->tensors().size(), 4U + 3U * 3U);
    EXPECT_TRUE(file_exists(destination() + "/config.json"));
    EXPECT_TRUE(file_exists(destination() + "/tokenizer.json"));
  }
  RecordProperty("whole", static_cast<int>(whole));
  RecordProperty("none", static_cast<int>(none));
  fs::remove_all(destination());
  ASSERT_TRUE(quantize_checkpoint(options()).ok());
  EXPECT_EQ(work_folders(), 0U);  // what the killed ones left is gone
}

TEST(QuantizableByDefault, SkipsEmbeddingsNormsRoutersAndHeads) {
  EXPECT_TRUE(quantizable_by_default("model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(quantizable_by_default("model.layers.0.mlp.experts.7.down_proj"));
  EXPECT_FALSE(quantizable_by_default("model.layers.0.mlp.gate"));
  EXPECT_FALSE(quantizable_by_default("model.layers.0.mlp.router"));
  EXPECT_FALSE(quantizable_by_default("model.embed_tokens"));
  EXPECT_FALSE(quantizable_by_default("model.layers.0.input_layernorm"));
  EXPECT_FALSE(quantizable_by_default("lm_head"));
}

}  // namespace
}  // namespace nibble
