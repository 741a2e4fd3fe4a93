#include "model/decoder_scratch.h"

#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace nibble {
namespace {

/// The CPU, in the part of a device with memory of its own: counts what models allocate there.
class CountingBackend final : public Backend {
 public:
  [[nodiscard]] std::string_view name() const override { return "counting"; }
  [[nodiscard]] int threads() const override { return 1; }
  [[nodiscard]] bool host_memory() const override { return false; }
  Result<DeviceBuffer> allocate(size_t bytes) override {
    allocated += static_cast<int64_t>(bytes);
    return cpu_->allocate(bytes);
  }
  Result<DeviceBuffer> upload(std::span<const float> values) override {
    return cpu_->upload(values);
  }
  Result<std::unique_ptr<PreparedTable>> prepare_table(const QuantView& table,
                                                       std::shared_ptr<const void> owner) override {
    return cpu_->prepare_table(table, std::move(owner));
  }
  [[nodiscard]] Status check_gemm(const WeightFormat& format,
                                  const ActSpec& act,
                                  int64_t k) const override {
    return cpu_->check_gemm(format, act, k);
  }
  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                     const ActSpec& act,
                                                     int64_t max_m) override {
    return cpu_->prepare_gemm(parts, act, max_m);
  }
  Status prepare_steps(const StepLimits& limits) override {
    prepared = limits;
    return {};
  }
  void round_bf16(float* x, int64_t count) override { cpu_->round_bf16(x, count); }
  void run_step(const StepPlan& plan, const StepLayers& layers) override {
    cpu_->run_step(plan, layers);
  }

  int64_t allocated = 0;
  StepLimits prepared;

 private:
  std::unique_ptr<Backend> cpu_ = make_cpu_backend({.threads = 1}).value();
};

class DecoderScratchTest : public testing::TestWithParam<std::string> {};

TEST_P(DecoderScratchTest, TellsWhatADecoderAllocates) {
  CountingBackend backend;
  const ModelOptions options{.max_batch_tokens = 37, .max_logit_rows = 5, .max_sequences = 3};
  const auto model = load_model("tests/golden/" + GetParam(), backend, options);
  ASSERT_TRUE(model.ok()) << model.status().message();
  const ModelConfig& config = (*model)->config();
  const DecoderScratch scratch = decoder_scratch(config, options, backend);
  EXPECT_EQ(backend.allocated, scratch.total());
  EXPECT_EQ(scratch.logits, 5 * config.vocab_size * 4);
  EXPECT_EQ(backend.prepared.rows, 37);
  EXPECT_EQ(backend.prepared.sequences, 3);
  EXPECT_EQ(backend.prepared.logit_rows, 5);
  EXPECT_EQ(backend.prepared.pools, GetParam() == "qwen2_window" ? 2 : 1);
  EXPECT_EQ(backend.prepared.scaled_pairs, GetParam() == "llama_dynamic" ? config.head_dim / 2 : 0);
  // What is allocated is what the layers write, no more and no less: a step of the largest size.
  const int64_t heads = config.num_heads * config.head_dim;
  const int64_t kv_heads = config.num_kv_heads * config.head_dim;
  EXPECT_EQ(scratch.total(),
            4 * (37 + 5) * config.hidden_size + scratch.logits +
                37 * 4 * (2 * heads + 2 * kv_heads + 2 * config.intermediate_size));
}

INSTANTIATE_TEST_SUITE_P(Architectures,
                         DecoderScratchTest,
                         testing::Values("llama2", "llama_dynamic", "qwen2_window", "mistral"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace nibble
