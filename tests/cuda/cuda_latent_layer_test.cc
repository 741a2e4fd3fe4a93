// A layer of latent attention on the GPU beside the CPU: steps that hold rows to be decoded, short
// parts of prompts and long ones, whose attention is expanded.

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/expanded_plan.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "layers/latent_attention.h"

namespace nibble {
namespace {

using cuda::testing::random_values;

constexpr int64_t kHeads = 16;
constexpr int64_t kHidden = 256;
constexpr int64_t kMostRows = 1024;
constexpr int64_t kPageSize = 64;
constexpr int64_t kPagesOfSequence = 26;
constexpr double kTolerance = 0.03;  // each rounds to BF16 in other places

/// What a sequence brings to a step.
struct Part {
  int32_t sequence;
  int32_t rows;
  int32_t kv_len;
};

QuantTensor random_matrix(int64_t n, int64_t k, uint32_t seed) {
  QuantTensor out = QuantTensor::allocate({.code = WeightCode::kBf16}, n, k).value();
  const std::vector<float> values =
      random_values(static_cast<size_t>(n * k), seed, 1.0F / std::sqrt(static_cast<float>(k)));
  std::ranges::transform(values, out.codes.as<uint16_t>().begin(), f32_to_bf16);
  return out;
}

/// The layer on a backend with its cache. Layers of one q_rank have the same weights.
class LayerOn {
 public:
  LayerOn(std::unique_ptr<Backend> backend, int64_t q_rank) : backend_(std::move(backend)) {
    config_.dtype = DType::kBF16;
    config_.num_heads = kHeads;
    config_.hidden_size = kHidden;
    config_.latent = {
        .kv_rank = 512, .q_rank = q_rank, .nope_dim = 128, .rope_dim = 64, .value_dim = 128};
    const LatentConfig& form = config_.latent;
    const int64_t queries = kHeads * form.query_dim();
    LatentAttention::Parts parts{
        .norm = norm(kHidden),
        .down = linear((q_rank > 0 ? q_rank : queries) + form.row_dim(), kHidden),
        .q_norm = {},
        .q_up = {},
        .latent_norm = norm(form.kv_rank),
        .keys = heads(form.kv_rank, form.nope_dim),
        .values = heads(form.value_dim, form.kv_rank),
        .output = linear(kHidden, kHeads * form.value_dim)};
    if (q_rank > 0) {
      parts.q_norm = norm(q_rank);
      parts.q_up = linear(queries, q_rank);
    }
    std::vector<float> frequencies(static_cast<size_t>(form.rope_dim / 2));
    for (size_t i = 0; i < frequencies.size(); ++i) {
      frequencies[i] = static_cast<float>(std::pow(10000.0, static_cast<double>(i) / -32.0));
    }
    layer_ = std::make_unique<LatentAttention>(
        std::move(parts), config_,
        std::make_shared<RopeTable>(backend_->upload(frequencies).value(), 1.0F, DynamicRope{}));
    EXPECT_TRUE(backend_
                    ->prepare_steps({.rows = kMostRows,
                                     .sequences = 8,
                                     .logit_rows = 8,
                                     .positions = kPageSize * kPagesOfSequence,
                                     .input_width = kHidden * 4,
                                     .hidden = kHidden,
                                     .latent_heads = kHeads,
                                     .latent_row = form.row_dim(),
                                     .latent_key = form.nope_dim,
                                     .latent_value = form.value_dim})
                    .ok());
    kv_ = {.code = KvCode::kBf16,
           .page_size = kPageSize,
           .kv_heads = 1,
           .head_dim = form.row_dim(),
           .latent_rank = form.kv_rank};
    EXPECT_TRUE(backend_->check_kv(kv_, kHeads).ok());
    const int64_t bytes = backend_->kv_page_bytes(kv_) * 8 * kPagesOfSequence;
    pages_ = backend_->upload(std::vector<float>(static_cast<size_t>(bytes) / 4, NAN)).value();
    kv_.pages = pages_.as<std::byte>();
    for (const ScratchNeed& need : LatentAttention::scratch(config_)) {
      const std::vector<float> nothing(static_cast<size_t>(kMostRows * need.width), NAN);
      scratch_memory_.push_back(backend_->upload(nothing).value());
      scratch_.set(need.name,
                   {scratch_memory_.back().as<void>(), backend_->activation_type(DType::kBF16)});
    }
    program_ = backend_->new_program();
  }

  /// Random rows of a step and what the layer has added to them.
  std::vector<float> run(const std::vector<Part>& parts, uint32_t seed) {
    std::vector<int32_t> pages(8 * kPagesOfSequence);
    std::iota(pages.rbegin(), pages.rend(), 0);
    std::vector<SequenceSpan> spans;
    int32_t rows = 0;
    for (const Part& part : parts) {
      spans.push_back({.q_begin = rows,
                       .q_len = part.rows,
                       .kv_len = part.kv_len,
                       .pages = pages.data() + part.sequence * kPagesOfSequence});
      rows += part.rows;
    }
    const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
    const auto numbers = static_cast<size_t>(rows * kHidden);
    const DeviceBuffer hidden = backend_->upload(random_values(numbers, seed, 1.0F)).value();
    const StepPlan plan{.input = {.tokens = tokens, .sequences = spans, .logit_rows = {}},
                        .page_size = kPageSize,
                        .program = program_};
    backend_->run_step(plan, [&](Step& step) {
      layer_->forward(hidden.as<float>(), {.step = step,
                                           .rows = step.rows(),
                                           .sequences = step.input().sequences,
                                           .kv = kv_,
                                           .scratch = scratch_});
    });
    std::vector<float> out(numbers);
    backend_->read(hidden.as<float>(), out);
    return out;
  }

 private:
  Norm norm(int64_t channels) {
    std::vector<float> weights = random_values(static_cast<size_t>(channels), ++seed_, 0.1F);
    std::ranges::transform(weights, weights.begin(), [](float x) { return 1.0F + x; });
    return {backend_->upload(weights).value(), 1e-6};
  }
  Linear linear(int64_t n, int64_t k) {
    const QuantTensor matrix = random_matrix(n, k, ++seed_);
    MappedLinear part;
    part.weight = view_of(matrix);
    part.act = ActFormat::kBf16;
    return Linear::prepare({&part, 1}, {}, *backend_, kMostRows).value();
  }
  std::unique_ptr<PreparedHeads> heads(int64_t n, int64_t k) {
    std::vector<QuantTensor> tensors;
    for (int64_t head = 0; head < kHeads; ++head) {
      tensors.push_back(random_matrix(n, k, ++seed_));
    }
    std::vector<QuantView> views(tensors.size());
    std::ranges::transform(tensors, views.begin(), view_of);
    return backend_->prepare_heads(views, ActFormat::kBf16, kMostRows).value();
  }

  std::unique_ptr<Backend> backend_;
  ModelConfig config_;
  uint32_t seed_ = 0;
  std::unique_ptr<LatentAttention> layer_;
  KvView kv_;
  DeviceBuffer pages_;
  std::vector<DeviceBuffer> scratch_memory_;
  Scratch scratch_;
  int64_t program_ = 0;
};

void check_steps(int64_t q_rank) {
  SCOPED_TRACE(testing::Message() << "queries of rank " << q_rank);
  LayerOn gpu(make_cuda_backend({}).value(), q_rank);
  LayerOn cpu(make_cpu_backend({}).value(), q_rank);
  struct TestStep {
    std::vector<Part> parts;
    int expanded;  // parts of which this many cost less so
  };
  const std::vector<TestStep> steps = {
      {{{0, 900, 900}, {1, 64, 64}, {2, 20, 20}}, 1},  // from empty caches
      {{{1, 1, 65}, {0, 500, 1400}, {2, 20, 40}, {3, 129, 129}, {4, 5, 5}}, 1},
      {{{0, 200, 1600}, {3, 600, 729}}, 2},  // nothing is absorbed
      {{{1, 1, 66}, {2, 1, 41}, {4, 1, 6}}, 0},
      {{{0, 1, 1601}, {4, 700, 706}, {1, 3, 69}, {2, 65, 106}, {3, 1, 730}}, 1},
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::vector<Part>& parts = steps[i].parts;
    const auto expanded = std::ranges::count_if(parts, [](const Part& part) {
      return cuda::is_expanded(kHeads, {.rows = part.rows, .kv_len = part.kv_len});
    });
    ASSERT_EQ(expanded, steps[i].expanded) << "step " << i;
    const std::vector<float> got = gpu.run(parts, 100 + static_cast<uint32_t>(i));
    const std::vector<float> want = cpu.run(parts, 100 + static_cast<uint32_t>(i));
    const std::vector<float> before =
        random_values(want.size(), 100 + static_cast<uint32_t>(i), 1.0F);
    for (size_t row = 0; row * kHidden < want.size(); ++row) {
      double gap = 0.0;
      double size = 0.0;
      for (size_t at = row * kHidden; at < (row + 1) * kHidden; ++at) {
        gap += std::pow(static_cast<double>(got[at]) - want[at], 2);
        size += std::pow(static_cast<double>(want[at]) - before[at], 2);
      }
      ASSERT_LT(std::sqrt(gap / size), kTolerance)
          << "step " << i << " with " << expanded << " expanded sequences, row " << row;
    }
  }
}

TEST(CudaLatentLayer, AbsorbedAndExpandedRowsAreTheCpus) {
  NIBBLE_NEEDS_GPU();
  if (!cuda::query_device(0)->hopper()) {
    GTEST_SKIP() << "only Hopper expands latents";
  }
  check_steps(0);
  check_steps(192);
}

}  // namespace
}  // namespace nibble
