#include "layers/latent_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/testing/random_gemm.h"
#include "ops/attention.h"
#include "ops/latent.h"

namespace nibble {
namespace {

constexpr int64_t kHeads = 3;
constexpr int64_t kHidden = 24;
constexpr int64_t kRows = 8;
constexpr int64_t kPageSize = 4;
constexpr int32_t kPages[] = {0, 1, 2, 3, 4, 5};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Without cached tokens, with some, of one row, and again of several.
const std::vector<SequenceSpan>& spans() {
  static const std::vector<SequenceSpan> all = {
      {.q_begin = 0, .q_len = 2, .kv_len = 2, .pages = kPages},
      {.q_begin = 2, .q_len = 3, .kv_len = 7, .pages = kPages + 1},
      {.q_begin = 5, .q_len = 1, .kv_len = 4, .pages = kPages + 3},
      {.q_begin = 6, .q_len = 2, .kv_len = 5, .pages = kPages + 4}};
  return all;
}

/// Matrices of a layer with latent attention, in F32.
struct Weights {
  LatentConfig form;
  std::vector<float> keys;    // [heads][kv_rank, nope_dim]
  std::vector<float> values;  // [heads][value_dim, kv_rank]
};

/// A step of references, which computes the sequences in `expanded` in that form.
class ReferenceStep final : public Step {
 public:
  ReferenceStep(const StepInput& input, const Weights& weights, std::set<size_t> expanded)
      : Step(input, kRows, 0), weights_(weights), expanded_(std::move(expanded)) {}

  [[nodiscard]] const int32_t* tokens() const override { return nullptr; }
  [[nodiscard]] const int32_t* positions() const override { return nullptr; }
  void rope_append_kv(const RopeAppendArgs& /*args*/) override { FAIL(); }
  void normalize(const NormalizeArgs& /*args*/) override { FAIL(); }
  void add_gated(const GatedAddArgs& /*args*/) override { FAIL(); }
  void take_logit_rows(const float* /*from*/, int64_t /*width*/, float* /*to*/) override { FAIL(); }
  void sample(float* /*logits*/, int64_t /*vocab*/) override { FAIL(); }

  void append_latent(const LatentAppendArgs& args) override { reference_latent_append(args); }
  void rotate_latent_queries(const LatentQueryArgs& args) override {
    reference_latent_queries(args);
  }
  /// Of the absorbed sequences alone.
  void attention(const AttentionArgs& args) override {
    std::vector<SequenceSpan> absorbed;
    for (size_t i = 0; i < args.sequences.size(); ++i) {
      if (!expanded_.contains(i)) {
        absorbed.push_back(args.sequences[i]);
      }
    }
    AttentionArgs rest = args;
    rest.sequences = absorbed;
    reference_attention(rest);
    ++attentions;
  }
  [[nodiscard]] std::vector<RowRange> absorbed_rows(const ExpandedLatentArgs& args) override {
    if (expanded_.empty()) {
      return Step::absorbed_rows(args);
    }
    std::vector<RowRange> ranges;
    for (size_t i = 0; i < spans().size(); ++i) {
      if (!expanded_.contains(i)) {
        ranges.push_back({spans()[i].q_begin, spans()[i].q_len});
      }
    }
    return ranges;
  }
  void attend_expanded(const ExpandedLatentArgs& args) override {
    for (const size_t i : expanded_) {
      for (int32_t row = 0; row < spans()[i].q_len; ++row) {
        for (int64_t head = 0; head < args.heads; ++head) {
          attend(args, spans()[i], row, head);
        }
      }
    }
  }

  int attentions = 0;

 private:
  void attend(const ExpandedLatentArgs& args,
              const SequenceSpan& span,
              int32_t row,
              int64_t head) const {
    const LatentConfig& form = weights_.form;
    const int64_t index = int64_t{span.q_begin} + row;
    const float* const q =
        static_cast<const float*>(args.q.data) + index * args.q_stride + head * form.query_dim();
    const float* const rotated = static_cast<const float*>(args.rotated.data) +
                                 (index * args.heads + head) * form.row_dim() + form.kv_rank;
    const float* const make_key = weights_.keys.data() + head * form.kv_rank * form.nope_dim;
    const float* const make_value = weights_.values.data() + head * form.value_dim * form.kv_rank;
    std::vector<double> sums(static_cast<size_t>(form.value_dim), 0.0);
    double total = 0.0;
    for (int32_t token = 0; token <= span.kv_len - span.q_len + row; ++token) {
      const auto* const cached = reinterpret_cast<const float*>(
          args.kv.keys(span.pages[token / kPageSize], 0) + token % kPageSize * args.kv.row_bytes());
      double score = 0.0;
      for (int64_t i = 0; i < form.nope_dim; ++i) {
        double key = 0.0;
        for (int64_t j = 0; j < form.kv_rank; ++j) {
          key += static_cast<double>(cached[j]) * make_key[j * form.nope_dim + i];
        }
        score += key * q[i];
      }
      for (int64_t i = 0; i < form.rope_dim; ++i) {
        score += static_cast<double>(cached[form.kv_rank + i]) * rotated[i];
      }
      const double weight = std::exp(score * args.scale);
      total += weight;
      for (int64_t i = 0; i < form.value_dim; ++i) {
        double value = 0.0;
        for (int64_t j = 0; j < form.kv_rank; ++j) {
          value += static_cast<double>(cached[j]) * make_value[i * form.kv_rank + j];
        }
        sums[static_cast<size_t>(i)] += weight * value;
      }
    }
    float* const out = args.out.f32() + (index * args.heads + head) * form.value_dim;
    for (int64_t i = 0; i < form.value_dim; ++i) {
      out[i] = static_cast<float>(sums[static_cast<size_t>(i)] / total);
    }
  }

  const Weights& weights_;
  std::set<size_t> expanded_;
};

/// A layer on a CPU with its cache.
class LatentLayer {
 public:
  explicit LatentLayer(int64_t q_rank) {
    config_.num_heads = kHeads;
    config_.hidden_size = kHidden;
    config_.latent = {
        .kv_rank = 16, .q_rank = q_rank, .nope_dim = 8, .rope_dim = 4, .value_dim = 6};
    const LatentConfig& form = config_.latent;
    weights_ = {.form = form,
                .keys = random_floats(kHeads * form.kv_rank * form.nope_dim, 1),
                .values = random_floats(kHeads * form.value_dim * form.kv_rank, 2)};
    const int64_t queries = kHeads * form.query_dim();
    LatentAttention::Parts parts{
        .norm = norm(kHidden),
        .down = linear((q_rank > 0 ? q_rank : queries) + form.row_dim(), kHidden),
        .q_norm = {},
        .q_up = {},
        .latent_norm = norm(form.kv_rank),
        .keys = heads(weights_.keys, form.kv_rank, form.nope_dim),
        .values = heads(weights_.values, form.value_dim, form.kv_rank),
        .output = linear(kHidden, kHeads * form.value_dim)};
    if (q_rank > 0) {
      parts.q_norm = norm(q_rank);
      parts.q_up = linear(queries, q_rank);
    }
    const std::vector<float> frequencies = {1.0F, 0.1F};
    layer_ = std::make_unique<LatentAttention>(
        std::move(parts), config_,
        std::make_shared<RopeTable>(backend_->upload(frequencies).value(), 1.0F, DynamicRope{}));
  }

  /// What the layer adds to random rows; how often it asked for absorbed attention.
  std::pair<std::vector<float>, int> run(const std::set<size_t>& expanded) {
    const LatentConfig& form = config_.latent;
    KvView kv{.code = KvCode::kF32,
              .page_size = kPageSize,
              .kv_heads = 1,
              .head_dim = form.row_dim(),
              .latent_rank = form.kv_rank};
    std::vector<float> cache =
        random_floats(std::ssize(kPages) * kv.page_bytes() / int64_t{sizeof(float)}, 4);
    kv.pages = reinterpret_cast<std::byte*>(cache.data());
    const std::vector<int32_t> tokens(kRows, 0);
    const StepInput input{.tokens = tokens, .sequences = spans(), .logit_rows = {}};
    ReferenceStep step(input, weights_, expanded);
    ForwardContext context{.step = step, .rows = kRows, .sequences = spans(), .kv = kv};
    std::vector<std::vector<float>> memory;
    for (const ScratchNeed& need : LatentAttention::scratch(config_)) {
      memory.emplace_back(static_cast<size_t>(kRows * need.width), kNaN);
      context.scratch.set(need.name, memory.back().data());
    }
    std::vector<float> hidden = random_floats(kRows * kHidden, 5);
    layer_->forward(hidden.data(), context);
    return {hidden, step.attentions};
  }

 private:
  QuantTensor tensor(const float* values, int64_t n, int64_t k) {
    QuantTensor out = QuantTensor::allocate({.code = WeightCode::kF32}, n, k).value();
    std::copy_n(values, n * k, out.codes.as<float>().begin());
    return out;
  }
  Norm norm(int64_t channels) {
    return {backend_->upload(random_floats(channels, ++seed_)).value(), 1e-6};
  }
  Linear linear(int64_t n, int64_t k) {
    const std::vector<float> values = random_floats(n * k, ++seed_);
    const QuantTensor matrix = tensor(values.data(), n, k);
    MappedLinear part;
    part.weight = view_of(matrix);
    part.act = ActFormat::kFloat;
    return Linear::prepare({&part, 1}, {}, *backend_, kRows).value();
  }
  std::unique_ptr<PreparedHeads> heads(const std::vector<float>& values, int64_t n, int64_t k) {
    std::vector<QuantTensor> tensors;
    for (int64_t head = 0; head < kHeads; ++head) {
      tensors.push_back(tensor(values.data() + head * n * k, n, k));
    }
    std::vector<QuantView> views(tensors.size());
    std::ranges::transform(tensors, views.begin(), view_of);
    return backend_->prepare_heads(views, ActFormat::kFloat, kRows).value();
  }

  std::unique_ptr<Backend> backend_ = make_cpu_backend({.threads = 2}).value();
  ModelConfig config_;
  Weights weights_;
  uint32_t seed_ = 10;
  std::unique_ptr<LatentAttention> layer_;
};

// Whichever sequences a step expands, rows are what they are in the absorbed form.
TEST(LatentAttention, ExpandedRowsEqualAbsorbedOnes) {
  for (const int64_t q_rank : {0, 8}) {
    LatentLayer layer(q_rank);
    const auto [want, asked] = layer.run({});
    EXPECT_EQ(asked, 1);
    for (const std::set<size_t>& expanded :
         std::vector<std::set<size_t>>{{0}, {1}, {3}, {0, 1}, {1, 3}, {0, 1, 2, 3}}) {
      const auto [got, attentions] = layer.run(expanded);
      EXPECT_EQ(attentions, expanded.size() < spans().size() ? 1 : 0);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(got[i], want[i], 1e-4 * std::fabs(want[i]) + 1e-4)
            << "row " << i / kHidden << " of " << expanded.size() << " expanded sequences";
      }
    }
  }
}

}  // namespace
}  // namespace nibble
