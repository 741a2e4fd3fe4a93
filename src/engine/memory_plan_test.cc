#include "engine/memory_plan.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "arch/kv_specs.h"
#include "model/decoder_scratch.h"

namespace nibble {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// A GPU with so much memory that computes nothing.
class FakeGpu final : public Backend {
 public:
  explicit FakeGpu(int64_t free) : free_(free) {}

  [[nodiscard]] std::string_view name() const override { return "gpu"; }
  [[nodiscard]] int threads() const override { return 1; }
  [[nodiscard]] bool host_memory() const override { return false; }
  [[nodiscard]] int64_t free_memory() const override { return free_; }
  Result<std::unique_ptr<PreparedTable>> prepare_table(const QuantView&,
                                                       std::shared_ptr<const void>) override {
    return make_error(StatusCode::kUnsupported, "no tables");
  }
  [[nodiscard]] Status check_gemm(const WeightFormat&, const ActSpec&, int64_t) const override {
    return {};
  }
  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView>,
                                                     const ActSpec&,
                                                     int64_t) override {
    return make_error(StatusCode::kUnsupported, "no products");
  }
  [[nodiscard]] int64_t step_bytes(const StepLimits& limits) const override {
    return limits.rows * limits.scaled_pairs * 4;
  }
  [[nodiscard]] Status check_kv(const KvView&, int64_t) const override { return {}; }
  void round_bf16(float*, int64_t) override {}
  Status prepare_steps(const StepLimits&) override { return {}; }
  void run_step(const StepPlan&, const StepLayers&) override {}

 private:
  int64_t free_;
};

class MemoryPlanTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/memory_plan_" +
              testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(folder_);
    make("model-1.safetensors", "a", 300 * kMiB);
    make("model-2.safetensors", "b", 200 * kMiB);
    make("consolidated.safetensors", "c", 700 * kMiB);  // the same weights under other names
    std::ofstream(folder_ + "/model.safetensors.index.json")
        << R"({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})";
    config_.dtype = DType::kBF16;
    config_.vocab_size = 1024;
    config_.hidden_size = 512;
    config_.intermediate_size = 1024;
    config_.num_layers = 4;
    config_.num_heads = 8;
    config_.num_kv_heads = 4;
    config_.head_dim = 64;
    config_.max_position = 8192;
    config_.sliding_windows = {0, 0, 0, 0};
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  /// A file with one tensor of zeros.
  void make(const std::string& name, const std::string& tensor, int64_t bytes) const {
    const std::string header =
        fmt::format(R"({{"{}": {{"dtype": "U8", "shape": [{}], "data_offsets": [0, {}]}}}})",
                    tensor, bytes, bytes);
    const uint64_t length = header.size();
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << header;
    file.close();
    std::filesystem::resize_file(folder_ + "/" + name,
                                 sizeof(length) + length + static_cast<uint64_t>(bytes));
  }

  std::string folder_;
  ModelConfig config_;
};

TEST_F(MemoryPlanTest, CountsTheWeightsThatAreRead) {
  const FakeGpu gpu(4096 * kMiB);
  const MemoryPlan plan = plan_memory({}, folder_, config_, gpu).value();
  EXPECT_EQ(plan.free, 4096 * kMiB);
  EXPECT_EQ(plan.weights, 500 * kMiB);
  EXPECT_EQ(plan.free, plan.weights + plan.scratch + plan.reserve + plan.margin + plan.cache());
  config_.tie_word_embeddings = true;
  config_.dtype = DType::kBF16;
  EXPECT_EQ(plan_memory({}, folder_, config_, gpu)->weights, 500 * kMiB);
  config_.dtype = DType::kF16;
  EXPECT_EQ(plan_memory({}, folder_, config_, gpu)->weights, 501 * kMiB);
}

TEST_F(MemoryPlanTest, CountsWhatAModelAllocatesAndTheBackendBesides) {
  const FakeGpu gpu(4096 * kMiB);
  EngineOptions options;
  options.max_num_batched_tokens = 1000;
  options.max_num_seqs = 10;
  options.max_prompt_rows = 7;
  const int64_t scratch = plan_memory(options, folder_, config_, gpu)->scratch;
  EXPECT_EQ(scratch, decoder_scratch(config_, model_options(options), gpu).total());
  const int64_t row = 4 * (config_.vocab_size + config_.hidden_size);
  options.max_prompt_rows = 100;
  EXPECT_EQ(plan_memory(options, folder_, config_, gpu)->scratch, scratch + 93 * row);
  options.max_prompt_rows = 0;  // as many as 128 MiB hold
  EXPECT_EQ(plan_memory(options, folder_, config_, gpu)->scratch,
            scratch + (std::min<int64_t>(128 * kMiB / 4 / config_.vocab_size, 1000) - 7) * row);
  options.max_prompt_rows = 7;
  config_.rope.kind = RopeKind::kDynamicNtk;  // each row has frequencies of its own
  EXPECT_EQ(plan_memory(options, folder_, config_, gpu)->scratch, scratch + 1000 * 32 * 4);
}

// A window in every other layer: these keep what so many sequences see, and the rest of the memory
// holds more tokens of the others.
TEST_F(MemoryPlanTest, WindowsLeaveMemoryToOtherLayers) {
  const FakeGpu gpu(4096 * kMiB);
  EngineOptions options;
  options.max_num_seqs = 64;
  options.max_num_batched_tokens = 512;
  options.kv_bytes = 512 * kMiB;
  config_.max_position = 65536;
  const auto plain = resolve_in_memory(options, folder_, config_, gpu).value();
  ASSERT_EQ(plain.pool_pages.size(), 1U);
  config_.sliding_windows = {512, 0, 512, 0};
  const auto windows = resolve_in_memory(options, folder_, config_, gpu).value();
  ASSERT_EQ(windows.pool_pages.size(), 2U);
  EXPECT_EQ(windows.max_model_len, 65536);
  const int64_t all = plain.pool_pages[0];
  // 64 sequences of at most 37 pages and a step of 32, and as much for the prefix cache.
  EXPECT_EQ(windows.pool_pages[0], 2 * (64 * 38 + 32));
  EXPECT_EQ(windows.pool_pages[1], 2 * all - windows.pool_pages[0]);
  const KvCacheShape shape{.layers = kv_specs(config_, KvCode::kBf16),
                           .page_size = windows.page_size,
                           .num_pages = windows.pool_pages};
  EXPECT_LE(shape.bytes(&gpu), options.kv_bytes);
  options.max_num_seqs = 16;
  const auto few = resolve_in_memory(options, folder_, config_, gpu).value();
  EXPECT_EQ(few.pool_pages, (std::vector<int64_t>{2 * (16 * 38 + 32), 15104}));
  options.max_num_seqs = 64;

  // Where windows need as much as anybody, nothing changes.
  config_.sliding_windows = {60000, 0, 60000, 0};
  const auto wide = resolve_in_memory(options, folder_, config_, gpu).value();
  EXPECT_EQ(wide.pool_pages, (std::vector<int64_t>{all, all}));
  // With windows alone, the length of a sequence is no matter.
  config_.sliding_windows = {512, 512, 512, 512};
  options.kv_bytes = 8 * kMiB;
  const auto narrow = resolve_in_memory(options, folder_, config_, gpu).value();
  EXPECT_LT(narrow.pool_pages[0] * narrow.page_size, 65536);
  EXPECT_EQ(narrow.max_model_len, 65536);
  options.kv_bytes = kMiB;  // fewer pages than one window
  const auto least = resolve_in_memory(options, folder_, config_, gpu).value();
  EXPECT_EQ(least.max_model_len, least.pool_pages[0] * least.page_size);
}

// Of a model whose keys and values differ in size no backend has kernels.
TEST_F(MemoryPlanTest, RefusesWhatNoPageHolds) {
  const FakeGpu gpu(4096 * kMiB);
  KvCacheShape shape = KvCacheShape::equal_pools(kv_specs(config_, KvCode::kBf16), 16, 4);
  EXPECT_TRUE(shape.check(gpu, config_.num_heads).ok());
  shape.layers[2].value_dim = 32;
  EXPECT_EQ(kv_pools(shape.layers).size(), 2U);
  const Status refused = shape.check(gpu, config_.num_heads);
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  for (const char* word : {"1 of 4 layers", "keys of 64", "values of 32", "gpu"}) {
    EXPECT_NE(refused.message().find(word), std::string::npos) << refused.message();
  }
}

// Keys without codes have a pool that the plan counts: of each sequence the page that fills and the
// next one, and those of a step.
TEST_F(MemoryPlanTest, KeysWithoutCodesAreCounted) {
  const FakeGpu gpu(4096 * kMiB);
  EngineOptions options;
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 512;
  options.kv_code = KvCode::kInt4Page;
  const EngineOptions resolved = resolve_in_memory(options, folder_, config_, gpu).value();
  ASSERT_EQ(resolved.pool_pages.size(), 2U);
  EXPECT_EQ(resolved.pool_pages[1], 2 * 8 + 512 / resolved.page_size);
  const KvCacheShape shape{.layers = kv_specs(config_, options.kv_code),
                           .page_size = resolved.page_size,
                           .num_pages = resolved.pool_pages};
  const std::vector<int64_t> bytes = shape.page_bytes(&gpu);
  EXPECT_EQ(bytes[1], 4 * resolved.page_size * 4 * 64 * 2);  // layers, tokens, heads, BF16
  EXPECT_EQ(shape.bytes(&gpu),
            bytes[0] * resolved.pool_pages[0] + bytes[1] * resolved.pool_pages[1]);
  EXPECT_NE(shape.describe().find("keys that have no codes yet"), std::string::npos);
}

TEST_F(MemoryPlanTest, TheCacheGetsWhatIsLeft) {
  const FakeGpu gpu(4096 * kMiB);
  EngineOptions options;
  options.max_num_batched_tokens = 512;
  const MemoryPlan plan = plan_memory(options, folder_, config_, gpu).value();
  options.max_num_seqs = 4096;
  const auto resolved = resolve_in_memory(options, folder_, config_, gpu);
  ASSERT_TRUE(resolved.ok()) << resolved.status().message();
  EXPECT_LE(resolved->kv_bytes, plan.cache());
  EXPECT_GT(resolved->kv_bytes, plan.cache() - 64 * kMiB);  // 4096 rows of logits
  const int64_t page = 4 * gpu.kv_page_bytes({KvCode::kBf16, resolved->page_size, 4, 64, nullptr});
  EXPECT_LE(resolved->num_pages * page, resolved->kv_bytes);
  EXPECT_GT((resolved->num_pages + 1) * page, resolved->kv_bytes);
}

TEST_F(MemoryPlanTest, RefusesWithTheFigures) {
  EngineOptions options;
  options.max_num_seqs = 4096;
  options.max_num_batched_tokens = 512;
  const auto none = resolve_in_memory(options, folder_, config_, FakeGpu(1200 * kMiB));
  EXPECT_EQ(none.status().code(), StatusCode::kResourceExhausted);
  for (const char* word : {"weights take 500 MiB", "1200 MiB free", "scratch memory"}) {
    EXPECT_NE(none.status().message().find(word), std::string::npos) << none.status().message();
  }
  options.kv_bytes = 4000 * kMiB;
  const auto large = resolve_in_memory(options, folder_, config_, FakeGpu(4096 * kMiB));
  EXPECT_EQ(large.status().code(), StatusCode::kResourceExhausted);
  for (const char* word : {"cache of 4000 MiB", "4096 MiB free", "--kv-cache-memory"}) {
    EXPECT_NE(large.status().message().find(word), std::string::npos) << large.status().message();
  }
  // What was asked for may use the margin, too.
  options.kv_bytes = plan_memory(options, folder_, config_, FakeGpu(4096 * kMiB))->most_cache();
  EXPECT_TRUE(resolve_in_memory(options, folder_, config_, FakeGpu(4096 * kMiB)).ok());
}

TEST_F(MemoryPlanTest, AGpuTakesLargeStepsWhereItsMemoryAllows) {
  const auto sizes = [&](const EngineOptions& options, int64_t free) {
    const auto out = choose_step_sizes(options, folder_, config_, FakeGpu(free * kMiB)).value();
    return std::pair(out.max_num_seqs, out.max_num_batched_tokens);
  };
  using Sizes = std::pair<int64_t, int64_t>;
  constexpr int64_t kLarge = 140 << 10;
  EXPECT_EQ(sizes({}, kLarge), Sizes(256, 8192));
  EXPECT_EQ(sizes({.prefer = Preference::kThroughput}, kLarge), Sizes(512, 16384));
  EXPECT_EQ(sizes({.max_num_seqs = 7}, kLarge), Sizes(7, 8192));
  EXPECT_EQ(sizes({.max_num_batched_tokens = 300}, kLarge), Sizes(256, 300));
  // Steps of 8192 tokens need more than an eighth of what a small GPU's weights leave.
  const EngineOptions whole{.max_num_seqs = 256, .max_num_batched_tokens = 8192};
  const int64_t scratch = plan_memory(whole, folder_, config_, FakeGpu(0))->scratch / kMiB;
  const int64_t enough = 500 + 1024 + 8 * (scratch + 1);
  EXPECT_EQ(sizes({}, enough), Sizes(256, 8192));
  EXPECT_EQ(sizes({}, enough - 16), Sizes(256, 4096));
  EXPECT_EQ(sizes({}, 1200), Sizes(64, 512));  // nothing is left
  EXPECT_EQ(sizes(whole, 1200), Sizes(256, 8192));
}

TEST_F(MemoryPlanTest, NamesWeightsThatAreMissing) {
  std::filesystem::remove(folder_ + "/model-2.safetensors");
  const auto plan = plan_memory({}, folder_, config_, FakeGpu(4096 * kMiB));
  EXPECT_EQ(plan.status().code(), StatusCode::kNotFound);
  EXPECT_NE(plan.status().message().find("model-2.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace nibble
