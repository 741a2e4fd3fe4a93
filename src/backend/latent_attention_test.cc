#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/bf16_rows.h"
#include "ops/attention.h"
#include "ops/latent.h"

namespace nibble {
namespace {

struct Shape {
  int64_t heads = 4;
  int64_t rank = 32;
  int64_t rope = 8;
  int64_t nope = 16;
  int64_t q_rank = 24;  // 0: queries have one stage
  int64_t page_size = 16;
  KvCode code = KvCode::kF32;
  DType type = DType::kF32;
  bool interleaved = true;

  [[nodiscard]] int64_t row() const { return rank + rope; }
  [[nodiscard]] int64_t first() const { return q_rank > 0 ? q_rank : heads * (nope + rope); }
};

constexpr int32_t kLengths[2] = {150, 37};
constexpr int32_t kNew[2] = {17, 3};  // of them in the step
constexpr float kEps = 1e-6F;

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<float> values(static_cast<size_t>(count));
  std::ranges::generate(values, [&] { return normal(random); });
  return to_f32(to_bf16(values));
}

/// Memory of activations in F32 or BF16.
class Rows {
 public:
  Rows(const std::vector<float>& values, DType type)
      : wide_(values), narrow_(to_bf16(values)), type_(type) {}
  [[nodiscard]] Activations at() {
    return type_ == DType::kF32 ? Activations(wide_.data()) : Activations(narrow_.data(), type_);
  }
  [[nodiscard]] std::vector<float> values() const {
    return type_ == DType::kF32 ? wide_ : to_f32(narrow_);
  }

 private:
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
  DType type_;
};

/// Two sequences over pages in mixed order, all tokens of a sequence but the last in the cache.
class LatentStep {
 public:
  explicit LatentStep(const Shape& shape) : shape_(shape) {
    view_ = {.code = shape.code,
             .page_size = shape.page_size,
             .kv_heads = 1,
             .head_dim = shape.row(),
             .latent = true};
    const int64_t each = (kLengths[0] + shape.page_size - 1) / shape.page_size;
    memory_.assign(static_cast<size_t>(2 * each * view_.page_bytes() / 4),
                   std::numeric_limits<float>::quiet_NaN());
    for (int s = 0; s < 2; ++s) {
      for (int64_t i = 0; i < each; ++i) {
        tables_[s].push_back(static_cast<int32_t>(2 * (each - 1 - i) + s));
      }
    }
    for (int64_t i = 0; i < shape.rope / 2; ++i) {
      inv_freq_.push_back(
          std::pow(10000.0F, -2.0F * static_cast<float>(i) / static_cast<float>(shape.rope)));
    }
    q_norm_ = random_floats(shape.first(), 3);
    latent_norm_ = random_floats(shape.rank, 4);
  }

  struct Result {
    std::vector<float> rows;     // as append_latent() leaves them
    std::vector<float> queries;  // [tokens, heads, row]
    std::vector<float> out;      // [tokens, heads, rank]
    std::vector<float> memory;
  };

  /// The last step, after one that appends the tokens before; backend null: the oracles.
  Result run(Backend* backend) {
    append(backend, {kLengths[0] - kNew[0], kLengths[1] - kNew[1]}, {0, 0});
    return append(backend, {kNew[0], kNew[1]}, {kLengths[0] - kNew[0], kLengths[1] - kNew[1]});
  }

 private:
  Result append(Backend* backend,
                const std::array<int32_t, 2>& counts,
                const std::array<int32_t, 2>& done) {
    const Shape& s = shape_;
    std::vector<SequenceSpan> spans;
    int32_t tokens = 0;
    for (size_t i = 0; i < 2; ++i) {
      spans.push_back({.q_begin = tokens,
                       .q_len = counts.at(i),
                       .kv_len = done.at(i) + counts.at(i),
                       .pages = tables_[i].data()});
      tokens += counts.at(i);
    }
    const int64_t stride = s.first() + s.row();
    const auto seed = static_cast<uint32_t>(100 + done[0]);
    Rows rows(random_floats(tokens * stride, seed), s.type);
    Rows raw(random_floats(tokens * s.heads * (s.nope + s.rope), seed + 1), s.type);
    Rows queries(random_floats(tokens * s.heads * s.row(), seed + 2), s.type);
    const std::vector<float> poison(static_cast<size_t>(tokens * s.heads * s.row()),
                                    std::numeric_limits<float>::quiet_NaN());
    Rows out(poison, s.type);
    KvView view = view_;
    view.pages = reinterpret_cast<std::byte*>(memory_.data());
    const LatentRope rope{inv_freq_.data(), s.rope, 1.25F, s.interleaved};
    const LatentAppendArgs appended{.rows = rows.at(),
                                    .stride = stride,
                                    .q_rank = s.first(),
                                    .q_norm = s.q_rank > 0 ? q_norm_.data() : nullptr,
                                    .latent_norm = latent_norm_.data(),
                                    .norm_eps = kEps,
                                    .rope = rope,
                                    .kv = view,
                                    .sequences = spans};
    const LatentQueryArgs rotated{.q = raw.at(),
                                  .q_stride = s.heads * (s.nope + s.rope),
                                  .heads = s.heads,
                                  .head_dim = s.nope + s.rope,
                                  .rope = rope,
                                  .out = queries.at(),
                                  .out_dim = s.row(),
                                  .sequences = spans};
    const AttentionArgs attended{.q = queries.at(),
                                 .q_stride = s.heads * s.row(),
                                 .out = out.at(),
                                 .out_stride = s.heads * s.row(),
                                 .heads = s.heads,
                                 .scale = 0.2F,
                                 .kv = view,
                                 .sequences = spans};
    if (backend == nullptr) {
      reference_latent_append(appended);
      reference_latent_queries(rotated);
      reference_attention(attended);
    } else {
      backend->run_step({}, [&](Step& step) {
        step.append_latent(appended);
        step.rotate_latent_queries(rotated);
        step.attention(attended);
      });
    }
    Result result{rows.values(), queries.values(), {}, memory_};
    const std::vector<float> whole = out.values();
    for (int64_t head = 0; head < tokens * s.heads; ++head) {
      const auto first = whole.begin() + head * s.row();
      result.out.insert(result.out.end(), first, first + s.rank);
    }
    return result;
  }

  Shape shape_;
  KvView view_;
  std::vector<float> memory_;
  std::vector<int32_t> tables_[2];
  std::vector<float> inv_freq_;
  std::vector<float> q_norm_;
  std::vector<float> latent_norm_;
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0;
  double size = 0.0;
  EXPECT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) != std::isnan(b[i])) {
      return std::numeric_limits<double>::infinity();
    }
    if (!std::isnan(a[i])) {
      difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
      size += std::pow(static_cast<double>(b[i]), 2);
    }
  }
  return std::sqrt(difference / size);
}

class LatentAttentionTest : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override {
    auto backend = make_cpu_backend(
        {.threads = 3, .isa = std::string(GetParam()), .limit = ThreadLimit::kNone});
    ASSERT_TRUE(backend.ok()) << backend.status().message();
    backend_ = std::move(backend).value();
    // Sizes the rows of the workspace, as the product behind the first stage of queries does.
    auto weight = QuantTensor::allocate({.code = WeightCode::kF32}, 8, 2048).value();
    std::ranges::fill(weight.codes.as<float>(), 0.0F);
    product_ = backend_->prepare_gemm(weight, ActFormat::kFloat, 4).value();
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<PreparedGemm> product_;
};

TEST_P(LatentAttentionTest, AgreesWithTheOracles) {
  const Shape shapes[] = {
      {},
      {.heads = 1, .rank = 24, .rope = 16, .page_size = 8, .interleaved = false},
      {.heads = 3, .rank = 512, .rope = 64, .nope = 128, .q_rank = 1536},
      {.heads = 17, .rank = 128, .rope = 64},
      {.heads = 8, .rank = 64, .rope = 32, .q_rank = 0},
  };
  for (const Shape& shape : shapes) {
    LatentStep expected_step(shape);
    const LatentStep::Result expected = expected_step.run(nullptr);
    LatentStep step(shape);
    const LatentStep::Result actual = step.run(backend_.get());
    EXPECT_LT(distance(actual.rows, expected.rows), 1e-5);
    EXPECT_LT(distance(actual.queries, expected.queries), 1e-5);
    EXPECT_LT(distance(actual.memory, expected.memory), 1e-5);
    EXPECT_LT(distance(actual.out, expected.out), 1e-4) << shape.heads << " heads";
  }
}

TEST_P(LatentAttentionTest, Bf16CachesAgreeWithinTheirRounding) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    Shape shape{.heads = 16, .rank = 512, .rope = 64, .code = KvCode::kBf16, .type = type};
    const LatentStep::Result actual = LatentStep(shape).run(backend_.get());
    shape.code = KvCode::kF32;
    shape.type = DType::kF32;
    const LatentStep::Result expected = LatentStep(shape).run(nullptr);
    EXPECT_LT(distance(actual.out, expected.out), 1e-2);
  }
}

// Integers aside, sums have one order on all instruction sets.
TEST_P(LatentAttentionTest, GivesTheBitsOfScalarKernels) {
  const Shape shape{.heads = 5, .code = KvCode::kBf16, .type = DType::kBF16};
  auto scalar = make_cpu_backend({.threads = 1, .isa = "scalar"}).value();
  auto weight = QuantTensor::allocate({.code = WeightCode::kF32}, 8, 2048).value();
  std::ranges::fill(weight.codes.as<float>(), 0.0F);
  const auto product = scalar->prepare_gemm(weight, ActFormat::kFloat, 4).value();
  const LatentStep::Result expected = LatentStep(shape).run(scalar.get());
  const LatentStep::Result actual = LatentStep(shape).run(backend_.get());
  EXPECT_EQ(actual.out, expected.out);
  EXPECT_EQ(actual.queries, expected.queries);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets,
                         LatentAttentionTest,
                         testing::ValuesIn(cpu::supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace nibble
