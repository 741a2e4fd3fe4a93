// Branches of steps: decode steps of models with an expert that every token takes give the same
// bits whether that is computed beside the routed experts or on one stream with them, recorded or
// not, and every time.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "arch/kv_specs.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_info.h"
#include "backend/cuda/step_branch.h"
#include "backend/cuda/testing/gpu_test.h"
#include "model/model.h"
#include "model/testing/distance.h"
#include "quantizer/quantize.h"
#include "synthetic/dummy.h"

namespace nibble {
namespace {

/// A wide expert for all tokens, which takes longer than the routing, and one whose result is added
/// as much as a gate says.
constexpr const char* kKimi = R"({"architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512,
    "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 4, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.8,
    "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 192, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_hidden_layers": 5, "vocab_size": 1024,
    "max_position_embeddings": 300, "rope_theta": 50000.0})";
constexpr const char* kQwen2Moe = R"({"architectures": ["Qwen2MoeForCausalLM"],
    "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 12,
    "num_experts_per_tok": 3, "shared_expert_intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 1024,
    "max_position_embeddings": 300})";

/// A model with an expert that every token takes.
struct BranchedModel {
  const char* name;
  const char* config;
  const char* scheme;
  const char* shared;  // scheme of the expert that every token takes; null: as --scheme has it
};

class CudaStepBranch : public ::testing::TestWithParam<BranchedModel> {
 protected:
  void SetUp() override {
    const auto device = cuda::query_device(0);
    if (!device.ok()) {
      GTEST_SKIP() << device.status().message();
    }
    const std::string folder =
        (std::filesystem::temp_directory_path() /
         ("nibble_branch_" + std::string(GetParam().name) + std::to_string(::getpid())))
            .string();
    std::ofstream(folder + ".json") << GetParam().config;
    const auto made = make_dummy_checkpoint({.config = folder + ".json",
                                             .destination = folder,
                                             .dtype = DType::kBF16,
                                             .existing = ExistingOutput::kReplace});
    ASSERT_TRUE(made.ok()) << made.status().message();
    folder_ = folder;
    if (GetParam().scheme == std::string("bf16")) {
      return;
    }
    QuantizeOptions options;
    options.source = folder;
    options.destination = folder + "_quantized";
    options.plan.rules.scheme = find_scheme(GetParam().scheme).value();
    if (GetParam().shared != nullptr) {
      options.plan.rules.rules = {std::string("*.shared_experts.*=") + GetParam().shared};
    }
    options.existing = ExistingOutput::kReplace;
    const auto report = quantize_checkpoint(options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    folder_ = options.destination;
  }

  std::string folder_;
};

/// A model on a backend of its own, which decodes sequences side by side.
class Decoding {
 public:
  Decoding(const std::string& folder, const CudaBackendOptions& options)
      : backend_(make_cuda_backend(options).value()),
        model_(load_model(folder, *backend_, {.max_batch_tokens = 128, .max_logit_rows = 128})
                   .value()) {}

  /// Logits [steps, rows, vocab] of `rows` sequences of different tokens, from their first one on.
  std::vector<float> run(int64_t rows, int32_t steps) {
    constexpr KvCode kCode = KvCode::kBf16;
    const int64_t page_size = backend_->preferred_page_size(kCode);
    EXPECT_LE(steps, page_size);
    auto cache = model_
                     ->make_cache(KvCacheShape::equal_pools(kv_specs(model_->config(), kCode),
                                                            page_size, rows))
                     .value();
    std::vector<int32_t> numbers(static_cast<size_t>(rows));
    std::iota(numbers.begin(), numbers.end(), 0);  // of pages and rows
    const auto vocab = static_cast<size_t>(model_->config().vocab_size);
    std::vector<float> all;
    for (int32_t step = 0; step < steps; ++step) {
      std::vector<int32_t> tokens;
      std::vector<SequenceSpan> spans;
      for (int32_t row = 0; row < rows; ++row) {
        tokens.push_back(3 + (row * 37 + step * 101) % 1000);
        spans.push_back({.q_begin = row,
                         .q_len = 1,
                         .kv_len = step + 1,
                         .pages = numbers.data() + row,
                         .prompt_len = 1});
      }
      std::vector<float> logits(static_cast<size_t>(rows) * vocab);
      model_->forward({.tokens = tokens, .sequences = spans, .logit_rows = numbers}, cache, logits);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
};

TEST_P(CudaStepBranch, GivesTheBitsOfOneStream) {
  constexpr int64_t kMost = cuda::StepBranch::kMostRows;
  const bool brief = cuda::testing::brief_tests();
  const int32_t steps = brief ? 3 : 20;
  // Recorded steps have rows beside their sequences', by which kernels are chosen. They hold what
  // earlier steps left and take experts, too, which share their tiles out by how many rows they
  // have; so the backends that are compared run the same steps one after the other.
  Decoding one_stream(folder_, {.branch_steps = false});
  Decoding recorded(folder_, {});
  Decoding issued_on_one(folder_, {.record_steps = false, .branch_steps = false});
  Decoding issued(folder_, {.record_steps = false});
  // More rows have no branches.
  for (const int64_t rows :
       cuda::testing::row_counts({1, 2, 3, 4, 7, 17, 40, kMost, kMost + 1}, {1, 17})) {
    SCOPED_TRACE(::testing::Message() << rows << " rows");
    for (int repeat = 0; repeat < (brief ? 1 : 3); ++repeat) {
      const std::vector<float> expected = one_stream.run(rows, steps);
      EXPECT_TRUE(std::ranges::all_of(expected, [](float x) { return std::isfinite(x); }));
      EXPECT_GT(*std::ranges::max_element(expected), 0.0F);
      EXPECT_TRUE(recorded.run(rows, steps) == expected) << "recorded, repeat " << repeat;
      EXPECT_TRUE(issued.run(rows, steps) == issued_on_one.run(rows, steps))
          << "issued, repeat " << repeat;
    }
  }
}

// What a branch leaves is added once: a row of a small step is that of a step without branches.
TEST_P(CudaStepBranch, AddsWhatStepsOfManyRowsAdd) {
  Decoding model(folder_, {});
  const std::vector<float> many = model.run(cuda::StepBranch::kMostRows + 1, 1);
  const std::vector<float> few = model.run(5, 1);
  const double error = distance(few, std::vector<float>(many.begin(), many.begin() + few.size()));
  std::printf("%s: distance %.6f\n", GetParam().name, error);
  EXPECT_LE(error, 0.1);
}

INSTANTIATE_TEST_SUITE_P(
    Models,
    CudaStepBranch,
    ::testing::Values(BranchedModel{"kimi_bf16", kKimi, "bf16", nullptr},
                      BranchedModel{"kimi_w4a16", kKimi, "w4a16_g32", nullptr},
                      BranchedModel{"kimi_w4a16_all", kKimi, "w4a16_g32", "w4a16_g32"},
                      BranchedModel{"kimi_w4a16_fp8", kKimi, "w4a16_g32", "w8a8_fp8"},
                      BranchedModel{"kimi_w8a8_fp8", kKimi, "w8a8_fp8", "w8a8_fp8"},
                      BranchedModel{"kimi_w4a8", kKimi, "w4a8", nullptr},
                      BranchedModel{"qwen2_moe_bf16", kQwen2Moe, "bf16", nullptr},
                      BranchedModel{"qwen2_moe_w8a8_int8", kQwen2Moe, "w8a8_int8", nullptr}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace nibble
