#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_bf16.h"
#include "ops/attention.h"
#include "ops/latent.h"
#include "ops/reference/latent_rows.h"

namespace nibble {
namespace {

struct Shape {
  int64_t heads = 4;
  int64_t rank = 32;
  int64_t rope = 8;
  int64_t nope = 16;
  int64_t q_rank = 24;  // 0: queries have one stage
  int64_t page_size = 16;
  std::array<int32_t, 2> lengths = {150, 37};
  std::array<int32_t, 2> fresh = {17, 3};  // of them in the step
  KvCode code = KvCode::kF32;
  DType type = DType::kF32;
  bool interleaved = true;
  bool spoiled = false;  // the latent of the first sequence's last token is not finite

  [[nodiscard]] int64_t row() const { return rank + rope; }
  [[nodiscard]] int64_t first() const { return q_rank > 0 ? q_rank : heads * (nope + rope); }
};

constexpr float kEps = 1e-6F;
constexpr float kScale = 0.2F;

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
             .latent_rank = shape.rank};
    const int64_t each = (shape.lengths[0] + shape.page_size - 1) / shape.page_size;
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
    q_norm_ = random_bf16_floats(shape.first(), 3);
    latent_norm_ = random_bf16_floats(shape.rank, 4);
  }

  struct Result {
    std::vector<float> rows;     // as append_latent() leaves them
    std::vector<float> queries;  // [tokens, heads, row]
    std::vector<float> out;      // [tokens, heads, rank]
    std::vector<float> memory;
  };

  /// The last step, after one that appends the tokens before; backend null: the oracles.
  Result run(Backend* backend) {
    append(backend, earlier(), {0, 0}, Attend::kNo);
    return append(backend, shape_.fresh, earlier(), Attend::kYes);
  }

  /// The rows that run() leaves in the cache, by the oracle.
  void append_all() {
    append(nullptr, earlier(), {0, 0}, Attend::kNo);
    append(nullptr, shape_.fresh, earlier(), Attend::kNo);
  }

  /// The last result of run(), from the oracle over the rows that are in the cache.
  [[nodiscard]] std::vector<float> attended_by_oracle(const Result& result) {
    std::vector<float> out(result.queries.size());
    const std::vector<SequenceSpan> spans = spans_of(shape_.fresh, earlier());
    reference_attention({.q = const_cast<float*>(result.queries.data()),
                         .q_stride = shape_.heads * shape_.row(),
                         .out = out.data(),
                         .out_stride = shape_.heads * shape_.row(),
                         .heads = shape_.heads,
                         .scale = kScale,
                         .kv = view(),
                         .sequences = spans});
    return without_keys(out);
  }

  /// All rows of the cache as numbers, [tokens, row].
  [[nodiscard]] std::vector<float> decoded() {
    std::vector<float> out;
    for (size_t s = 0; s < 2; ++s) {
      for (int64_t t = 0; t < shape_.lengths.at(s); ++t) {
        const std::byte* page =
            view().keys(tables_[s][static_cast<size_t>(t / view_.page_size)], 0);
        for (int64_t d = 0; d < shape_.row(); ++d) {
          out.push_back(
              static_cast<float>(reference::read_latent(view_, page, t % view_.page_size, d)));
        }
      }
    }
    return out;
  }

 private:
  enum class Attend : bool { kNo, kYes };

  Result append(Backend* backend,
                const std::array<int32_t, 2>& counts,
                const std::array<int32_t, 2>& done,
                Attend attend) {
    const Shape& s = shape_;
    const std::vector<SequenceSpan> spans = spans_of(counts, done);
    const int32_t tokens = counts[0] + counts[1];
    const int64_t stride = s.first() + s.row();
    const auto seed = static_cast<uint32_t>(100 + done[0]);
    std::vector<float> numbers = random_bf16_floats(tokens * stride, seed);
    if (s.spoiled && done[0] > 0) {
      numbers[static_cast<size_t>((counts[0] - 1) * stride + s.first())] =
          std::numeric_limits<float>::infinity();
    }
    Rows rows(numbers, s.type);
    Rows raw(random_bf16_floats(tokens * s.heads * (s.nope + s.rope), seed + 1), s.type);
    Rows queries(random_bf16_floats(tokens * s.heads * s.row(), seed + 2), s.type);
    const std::vector<float> poison(static_cast<size_t>(tokens * s.heads * s.row()),
                                    std::numeric_limits<float>::quiet_NaN());
    Rows out(poison, s.type);
    const KvView view = this->view();
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
                                 .scale = kScale,
                                 .kv = view,
                                 .sequences = spans};
    if (backend == nullptr) {
      reference_latent_append(appended);
      if (attend == Attend::kYes) {
        reference_latent_queries(rotated);
        reference_attention(attended);
      }
    } else {
      backend->run_step({}, [&](Step& step) {
        step.append_latent(appended);
        if (attend == Attend::kYes) {
          step.rotate_latent_queries(rotated);
          step.attention(attended);
        }
      });
    }
    return {rows.values(), queries.values(), without_keys(out.values()), memory_};
  }

  /// Tokens in front of the last step's.
  [[nodiscard]] std::array<int32_t, 2> earlier() const {
    return {shape_.lengths[0] - shape_.fresh[0], shape_.lengths[1] - shape_.fresh[1]};
  }

  [[nodiscard]] KvView view() {
    KvView view = view_;
    view.pages = reinterpret_cast<std::byte*>(memory_.data());
    return view;
  }

  [[nodiscard]] std::vector<SequenceSpan> spans_of(const std::array<int32_t, 2>& counts,
                                                   const std::array<int32_t, 2>& done) const {
    std::vector<SequenceSpan> spans;
    int32_t tokens = 0;
    for (size_t i = 0; i < 2; ++i) {
      spans.push_back({.q_begin = tokens,
                       .q_len = counts.at(i),
                       .kv_len = done.at(i) + counts.at(i),
                       .pages = tables_[i].data()});
      tokens += counts.at(i);
    }
    return spans;
  }

  /// Results of heads [rank] without their last numbers, which mean nothing.
  [[nodiscard]] std::vector<float> without_keys(const std::vector<float>& whole) const {
    std::vector<float> out;
    for (auto head = whole.begin(); head != whole.end(); head += shape_.row()) {
      out.insert(out.end(), head, head + shape_.rank);
    }
    return out;
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

/// The formats of latents in codes.
std::vector<KvCode> latent_codes() {
  std::vector<KvCode> codes;
  std::ranges::copy_if(kKvCodes, std::back_inserter(codes),
                       [](KvCode code) { return kv_format(code).latent.parameters > 0; });
  return codes;
}

// Odd ranks, groups that are not full, pages of any size, sequences over several pieces of keys.
std::vector<Shape> odd_shapes() {
  return {
      {.heads = 5},
      {.heads = 1, .rank = 24, .rope = 16, .page_size = 3, .interleaved = false},
      {.heads = 3, .rank = 200, .rope = 24, .lengths = {601, 260}, .fresh = {2, 1}},
      {.heads = 6, .rank = 512, .rope = 64, .lengths = {1030, 517}, .fresh = {1, 1}},
      {.heads = 33, .rank = 136, .rope = 8, .page_size = 7, .lengths = {300, 70}, .fresh = {9, 1}},
  };
}

TEST_P(LatentAttentionTest, CodesAreThoseOfTheOracles) {
  for (const KvCode code : latent_codes()) {
    for (Shape shape : odd_shapes()) {
      shape.code = code;
      LatentStep expected(shape);
      expected.append_all();
      LatentStep actual(shape);
      const LatentStep::Result result = actual.run(backend_.get());
      // A number between two codes may take either.
      EXPECT_LT(distance(actual.decoded(), expected.decoded()), 2e-3)
          << kv_code_name(code) << " rank " << shape.rank;
      // Queries and what codes make are rounded to BF16.
      EXPECT_LT(distance(result.out, actual.attended_by_oracle(result)), 6e-3)
          << kv_code_name(code) << " rank " << shape.rank;
    }
  }
}

TEST_P(LatentAttentionTest, CodesCostWhatTheirBitsSay) {
  for (const KvCode code : latent_codes()) {
    Shape shape{.heads = 16, .rank = 512, .rope = 64, .code = code};
    const LatentStep::Result actual = LatentStep(shape).run(backend_.get());
    shape.code = KvCode::kF32;
    const LatentStep::Result expected = LatentStep(shape).run(nullptr);
    EXPECT_LT(distance(actual.out, expected.out), kv_format(code).tolerance) << kv_code_name(code);
  }
}

TEST_P(LatentAttentionTest, ALatentThatIsNotFiniteSpoilsItsOwnSequence) {
  for (const KvCode code : latent_codes()) {
    LatentStep step({.heads = 2, .code = code, .spoiled = true});
    const std::vector<float> out = step.run(backend_.get()).out;
    const size_t token = 2 * 32;  // of results
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(std::isnan(out[i]), i / token == 16) << kv_code_name(code) << ", number " << i;
    }
  }
}

// Integers aside, sums have one order on all instruction sets, and tasks of any number of threads.
TEST_P(LatentAttentionTest, GivesTheBitsOfScalarKernels) {
  auto scalar = make_cpu_backend({.threads = 1, .isa = "scalar"}).value();
  auto weight = QuantTensor::allocate({.code = WeightCode::kF32}, 8, 2048).value();
  std::ranges::fill(weight.codes.as<float>(), 0.0F);
  const auto product = scalar->prepare_gemm(weight, ActFormat::kFloat, 4).value();
  std::vector<KvCode> codes = latent_codes();
  codes.push_back(KvCode::kBf16);
  for (const KvCode code : codes) {
    for (Shape shape : odd_shapes()) {
      shape.code = code;
      shape.type = DType::kBF16;
      const LatentStep::Result expected = LatentStep(shape).run(scalar.get());
      const LatentStep::Result actual = LatentStep(shape).run(backend_.get());
      EXPECT_EQ(actual.out, expected.out) << kv_code_name(code) << " rank " << shape.rank;
      EXPECT_EQ(actual.queries, expected.queries);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InstructionSets,
                         LatentAttentionTest,
                         testing::ValuesIn(cpu::supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace nibble
