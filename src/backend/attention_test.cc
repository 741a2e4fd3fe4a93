#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_gemm.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr auto kCodes = kKvCodes;

struct CodeAndForm {
  KvCode code;
  AttentionForm form = AttentionForm::kOwn;
};
constexpr CodeAndForm kForms[] = {
    {KvCode::kF32},      {KvCode::kBf16},      {KvCode::kBf16, AttentionForm::kShared},
    {KvCode::kFp8},      {KvCode::kInt8},      {KvCode::kInt4},
    {KvCode::kInt4Page}, {KvCode::kInt4Static}};

struct Shape {
  KvCode code;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t page_size;
  int64_t window;
  int32_t lengths[2] = {150, 37};
  DType activations = DType::kF32;
  AttentionForm form = AttentionForm::kOwn;
  DynamicRope dynamic = {};
  int32_t prompts[2] = {0, 0};
  KvScales scales = {};
  const float* sinks = nullptr;  // [heads]
};

/// Of up to 34 heads: sinks that take nearly nothing, as much as the keys, and nearly everything.
constexpr std::array kSinks = [] {
  std::array<float, 34> sinks{};
  for (size_t i = 0; i < sinks.size(); ++i) {
    constexpr float kFirst[] = {0.5F, -200.0F, 4.0F, -3.0F, 9.0F, 300.0F};
    sinks.at(i) = kFirst[i % std::size(kFirst)];
  }
  return sinks;
}();

/// Steps of int4_static for numbers like those of random_floats(), some of which are clipped.
std::vector<float> random_steps(int64_t count) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(0.25F, 0.45F);
  std::vector<float> steps(static_cast<size_t>(count));
  std::ranges::generate(steps, [&] { return uniform(random); });
  return steps;
}

/// Two sequences over shuffled pages, filled in steps; keeps outputs of every token. Memory that no
/// token was written to is NaN.
class CachedRun {
 public:
  explicit CachedRun(const Shape& shape)
      : shape_(shape), steps_(random_steps(shape.kv_heads * shape.head_dim)) {
    if (kv_has_residual(shape.code)) {  // whole groups
      shape_.page_size = shape.page_size % 2 == 0 ? kChannelTokens : 2 * kChannelTokens;
    }
    view_.code = shape.code;
    view_.page_size = shape_.page_size;
    view_.kv_heads = shape.kv_heads;
    view_.head_dim = shape.head_dim;
    view_.scales = shape.scales;
    const int64_t longest = std::max(shape.lengths[0], shape.lengths[1]);
    const auto each = static_cast<int32_t>((longest + shape_.page_size - 1) / shape_.page_size);
    unread_page_ = 2 * each;
    memory_.assign(static_cast<size_t>((2 * each + 1) *
                                       (view_.page_bytes() + view_.residual_page_bytes()) / 4),
                   std::numeric_limits<float>::quiet_NaN());
    rebase();
    row_ = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    width_ = shape.heads * shape.head_dim;
    for (int32_t s = 0; s < 2; ++s) {
      for (int32_t i = 0; i < each; ++i) {
        tables_[s].push_back(2 * i + s);
      }
      std::shuffle(tables_[s].begin(), tables_[s].end(), std::mt19937(7));
      std::ranges::transform(tables_[s], std::back_inserter(residual_tables_[s]),
                             [each](int32_t page) { return 2 * each - 1 - page; });
      inputs_[s] = random_floats(shape.lengths[s] * row_, 11U + static_cast<uint32_t>(s));
      if (shape.activations == DType::kBF16) {
        inputs_[s] = to_f32(to_bf16(inputs_[s]));
      }
      outputs_[s].assign(static_cast<size_t>(shape.lengths[s] * width_), 0.0F);
    }
    for (int64_t i = 0; i < shape.head_dim / 2; ++i) {
      inv_freq_.push_back(
          std::pow(10000.0F, -2.0F * static_cast<float>(i) / static_cast<float>(shape.head_dim)));
    }
  }

  /// Makes one element of a token's input NaN.
  void spoil(int s, int64_t token, int64_t element) {
    inputs_[s][static_cast<size_t>(token * row_ + element)] =
        std::numeric_limits<float>::quiet_NaN();
  }

  /// The same BF16 numbers, handed over as F32.
  void wide_activations() { shape_.activations = DType::kF32; }

  /// Replaces elements x of tokens' queries by change(token, element, x).
  template <typename Change>
  void change_queries(const Change& change) {
    for (auto& inputs : inputs_) {
      for (int64_t i = 0; i < static_cast<int64_t>(inputs.size()); ++i) {
        float& x = inputs[static_cast<size_t>(i)];
        x = i % row_ < width_ ? change(i / row_, i % row_, x) : x;
      }
    }
  }

  /// Multiplies each token's keys by 1 + growth * token.
  void sharpen(float growth) {
    const int64_t begin = shape_.heads * shape_.head_dim;
    for (auto& inputs : inputs_) {
      for (int64_t i = 0; i < static_cast<int64_t>(inputs.size()); ++i) {
        const int64_t token = i / row_;
        if (i % row_ >= begin && i % row_ < begin + shape_.kv_heads * shape_.head_dim) {
          inputs[static_cast<size_t>(i)] *= 1.0F + growth * static_cast<float>(token);
        }
      }
    }
  }

  /// Multiplies the values by `factor`.
  void enlarge_values(float factor) {
    const int64_t begin = (shape_.heads + shape_.kv_heads) * shape_.head_dim;
    for (auto& inputs : inputs_) {
      for (int64_t i = 0; i < static_cast<int64_t>(inputs.size()); ++i) {
        inputs[static_cast<size_t>(i)] *= i % row_ >= begin ? factor : 1.0F;
      }
    }
  }

  /// Feeds the next counts[s] tokens of each sequence as one batch; no backend: the oracle.
  void step(Backend* backend, const int32_t (&counts)[2]) {
    std::vector<float> qkv;
    std::vector<SequenceSpan> spans;
    std::vector<SequenceSpan> residuals;
    std::array<std::vector<int32_t>, 2> tables = tables_;
    std::array<std::vector<int32_t>, 2> residual_tables = residual_tables_;
    int32_t rows = 0;
    for (int32_t s = 0; s < 2; ++s) {
      const int32_t count = std::min(counts[s], shape_.lengths[s] - done_[s]);
      qkv.insert(qkv.end(), inputs_[s].begin() + done_[s] * row_,
                 inputs_[s].begin() + (done_[s] + count) * row_);
      const int64_t unread = first_token_read(shape_.window, done_[s]) / shape_.page_size;
      std::fill_n(tables[s].begin(), unread, unread_page_);  // such pages are others' by then
      std::fill_n(residual_tables[s].begin(), first_token_read(1, done_[s]) / shape_.page_size,
                  unread_page_);
      spans.push_back({rows, count, done_[s] + count, tables[s].data(), shape_.prompts[s]});
      residuals.push_back(spans.back());
      residuals.back().pages = residual_tables[s].data();
      rows += count;
      done_[s] += count;
    }
    std::vector<float> out(static_cast<size_t>(rows * width_),
                           std::numeric_limits<float>::quiet_NaN());
    RopeAppendArgs rope{qkv.data(), row_, shape_.heads, inv_freq_.data(), 1.25F, view_, spans};
    AttentionArgs attention{
        qkv.data(),    row_,         out.data(),
        width_,        shape_.heads, 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
        shape_.window, view_,        spans};
    rope.form = attention.form = shape_.form;
    rope.dynamic = shape_.dynamic;
    attention.sinks = shape_.sinks;
    rope.residuals = attention.residuals = residuals;
    std::vector<uint16_t> narrow_qkv = to_bf16(qkv);
    std::vector<uint16_t> narrow_out = to_bf16(out);
    if (backend == nullptr) {
      reference_rope_append(rope);
      if (written_ != nullptr) {
        std::ranges::copy(*written_, memory_.begin());
      }
      round_queries(qkv);
      reference_attention(attention);
    } else {
      if (shape_.activations == DType::kBF16) {
        rope.qkv = {narrow_qkv.data(), DType::kBF16};
        attention.q = rope.qkv;
        attention.out = {narrow_out.data(), DType::kBF16};
      }
      backend->run_step({}, [&](Step& step) {
        step.rope_append_kv(rope);
        step.attention(attention);
      });
      if (shape_.activations == DType::kBF16) {
        out = to_f32(narrow_out);
      }
    }
    for (int32_t s = 0; s < 2; ++s) {
      const SequenceSpan& span = spans[static_cast<size_t>(s)];
      std::copy_n(out.begin() + span.q_begin * width_, span.q_len * width_,
                  outputs_[s].begin() + (done_[s] - span.q_len) * width_);
    }
  }

  void finish(Backend* backend, const int32_t (&counts)[2]) {
    while (done_[0] < shape_.lengths[0] || done_[1] < shape_.lengths[1]) {
      step(backend, counts);
    }
  }

  [[nodiscard]] const std::vector<float>& outputs(int s) const { return outputs_[s]; }
  [[nodiscard]] const std::vector<float>& memory() const { return memory_; }

  /// The oracle attends over this memory, whatever it would have written itself.
  void attend_over(const std::vector<float>& memory) { written_ = &memory; }

  /// Keys and values of a sequence as its cache tells them, [token, KV head, 2, head_dim].
  [[nodiscard]] std::vector<double> cached(int s) const {
    std::vector<double> values;
    for (int64_t token = 0; token < shape_.lengths[s]; ++token) {
      const int32_t page = tables_[s][static_cast<size_t>(token / shape_.page_size)];
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        for (const bool keys : {true, false}) {
          const float scale = keys ? shape_.scales.k : shape_.scales.v;
          const bool full = token / kChannelTokens < shape_.lengths[s] / kChannelTokens;
          const uint16_t* key =
              keys && !full && view_.residual != nullptr
                  ? view_.residual_key(
                        residual_tables_[s][static_cast<size_t>(token / shape_.page_size)], head,
                        token % shape_.page_size)
                  : nullptr;
          for (int64_t d = 0; d < shape_.head_dim; ++d) {
            values.push_back(key != nullptr ? bf16_to_f32(key[d])
                                            : element(page, head, keys, token, d) * scale);
          }
        }
      }
    }
    return values;
  }

  /// To be called on a copy: it reads and writes its own memory.
  void rebase() {
    view_.pages = reinterpret_cast<std::byte*>(memory_.data());
    if (kv_has_residual(shape_.code)) {
      view_.residual = view_.pages + (unread_page_ + 1) * view_.page_bytes();
    }
    view_.basis = basis_of(shape_.code);
    if (kv_format(shape_.code).per == KvParameters::kPerChannel) {
      view_.basis.turns_keys = shape_.heads % 2 == 0;
      view_.basis.key_step = view_.basis.value_step = steps_.data();
    }
  }

  /// The last `count` tokens of a sequence.
  [[nodiscard]] std::vector<float> last_outputs(int s, int64_t count) const {
    return {outputs_[s].end() - count * width_, outputs_[s].end()};
  }

 private:
  /// All caches but F32 meet queries rounded to BF16, INT8 and INT4 caches INT8 codes of these.
  void round_queries(std::vector<float>& qkv) const {
    for (size_t row = 0; row < qkv.size(); row += static_cast<size_t>(row_)) {
      for (int64_t head = 0; head < shape_.heads; ++head) {
        float* q = qkv.data() + row + head * shape_.head_dim;
        if (shape_.code != KvCode::kF32) {
          std::transform(q, q + shape_.head_dim, q, bf16_rounded);
        }
        if (shape_.code == KvCode::kInt8 || shape_.code == KvCode::kInt4) {
          round_to_codes(q);
        }
      }
    }
  }

  [[nodiscard]] double element(
      int64_t page, int64_t head, bool keys, int64_t token, int64_t d) const {
    const std::byte* half = keys ? view_.keys(page, head) : view_.values(page, head);
    const int64_t slot = token % shape_.page_size;
    const std::byte* row = half + slot * kv_row_bytes(shape_.code, shape_.head_dim);
    const auto* params = reinterpret_cast<const float*>(half + view_.params_offset());
    if (shape_.code == KvCode::kInt8) {
      return static_cast<double>(reinterpret_cast<const int8_t*>(row)[d]) * params[slot];
    }
    if (shape_.code == KvCode::kInt4) {
      return static_cast<double>(int4_code(row, d)) * params[2 * slot] + params[2 * slot + 1];
    }
    if (shape_.code == KvCode::kInt4Page) {
      const auto* lines = reinterpret_cast<const uint16_t*>(params);
      const int64_t dim = shape_.head_dim;
      const uint16_t* scale = keys ? lines + slot / kChannelTokens * 2 * dim + d : lines + 2 * slot;
      return static_cast<float>(int4_code(row, d)) * f16_to_f32(*scale) +
             f16_to_f32(scale[keys ? dim : 1]);
    }
    if (shape_.code == KvCode::kFp8) {
      return decode_e4m3(static_cast<uint8_t>(row[d]));
    }
    return reinterpret_cast<const float*>(row)[d];
  }

  static int int4_code(const std::byte* row, int64_t d) {
    return static_cast<int>(row[d / 2]) >> (d % 2 * 4) & 15;
  }
  static float bf16_rounded(float x) { return bf16_to_f32(f32_to_bf16(x)); }

  void round_to_codes(float* q) const {
    double largest = 0.0;
    for (int64_t d = 0; d < shape_.head_dim; ++d) {
      largest = std::max(largest, std::fabs(static_cast<double>(q[d])));
    }
    const double unit = largest / 127.0;
    for (int64_t d = 0; d < shape_.head_dim; ++d) {
      q[d] = static_cast<float>(std::nearbyint(q[d] / unit) * unit);
    }
  }

  Shape shape_;
  std::vector<float> steps_;  // of int4_static
  KvView view_;
  int64_t row_ = 0;
  int64_t width_ = 0;
  std::vector<float> memory_;
  const std::vector<float>* written_ = nullptr;
  std::vector<float> inv_freq_;
  std::array<std::vector<int32_t>, 2> tables_;
  std::array<std::vector<int32_t>, 2> residual_tables_;
  int32_t unread_page_ = 0;  // of NaN
  std::array<std::vector<float>, 2> inputs_;
  std::array<std::vector<float>, 2> outputs_;
  int32_t done_[2] = {0, 0};
};

/// Weights are rounded to BF16, 2^-9 of a value of up to 4, or INT8; INT4 keys to INT8 codes.
/// Rotations in f32 may move elements of queries and new rows across a rounding boundary.
double tolerance_of(KvCode code) {
  switch (code) {
    case KvCode::kF32:
      return 2e-5;
    case KvCode::kBf16:
      return 1e-2;
    case KvCode::kInt8:
      return 2e-2;
    case KvCode::kInt4:
      return 6e-2;
    case KvCode::kFp8:  // as of BF16: the oracle reads what was stored
    case KvCode::kInt4Static:
      return 1e-2;
    case KvCode::kInt4Page:  // codes and their lines become BF16 numbers
      return 2e-2;
  }
  return 0.0;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i]))
        << "element " << i << ": " << a[i] << ", " << b[i];
  }
}

void expect_near(const std::vector<float>& a, const std::vector<float>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_NEAR(a[i], b[i], tolerance) << "element " << i;
  }
}

CachedRun run(const Shape& shape, Backend* backend, const int32_t (&counts)[2]) {
  CachedRun result(shape);
  result.finish(backend, counts);
  return result;
}

TEST(Attention, EqualsTheReferenceInAnyPiecesOnEveryInstructionSet) {
  for (const auto& [code, form] : kForms) {
    for (Shape shape :
         {Shape{code, 4, 2, 64, 16, 0}, Shape{code, 3, 1, 24, 8, 20}, Shape{code, 2, 2, 136, 7, 0},
          Shape{code, 6, 1, 80, 16, 64}, Shape{code, 8, 1, 128, 16, 0},
          Shape{code, 2, 2, 256, 16, 130}, Shape{code, 34, 2, 64, 16, 0, {70, 9}},
          // Rows and columns that fill no group of sums, and the smallest and largest heads.
          Shape{code, 7, 1, 8, 16, 0, {67, 65}}, Shape{code, 10, 2, 40, 16, 33, {129, 64}},
          Shape{code, 11, 1, 48, 5, 31, {70, 33}}, Shape{code, 13, 1, 512, 16, 50, {66, 5}}}) {
      shape.form = form;
      shape.sinks = shape.heads % 2 == 1 || shape.head_dim == 64 ? kSinks.data() : nullptr;
      SCOPED_TRACE(testing::Message()
                   << "code " << static_cast<int>(code) << " form " << static_cast<int>(form)
                   << " head_dim " << shape.head_dim << " window " << shape.window);
      CachedRun expected(shape);
      std::unique_ptr<CachedRun> first;
      for (const std::string_view isa : cpu::supported_isas()) {
        SCOPED_TRACE(isa);
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        auto whole = std::make_unique<CachedRun>(run(shape, backend.get(), {1000, 1000}));
        const CachedRun single = run(shape, backend.get(), {1, 1});
        const CachedRun pieces = run(shape, backend.get(), {41, 5});
        if (first == nullptr) {
          expected.attend_over(whole->memory());
          expected.finish(nullptr, {1000, 1000});
        }
        for (int s = 0; s < 2; ++s) {
          // Of the shared form, rounding the largest weight shows as well: it is not 1.
          const double tolerance = form == AttentionForm::kShared ? 1.6e-2 : tolerance_of(code);
          expect_near(whole->outputs(s), expected.outputs(s), tolerance);
          expect_same_bits(single.outputs(s), whole->outputs(s));
          expect_same_bits(pieces.outputs(s), whole->outputs(s));
          if (first != nullptr) {
            expect_same_bits(first->outputs(s), whole->outputs(s));
          }
        }
        if (first != nullptr) {
          expect_same_bits(first->memory(), whole->memory());
        }
        first = std::move(whole);
      }
    }
  }
}

// Heads of 24 and 136 fill no vector, pages of 7 no group of keys.
TEST(Attention, Fp8CodesAreMultipliedWithTheScalesOfTheLayer) {
  for (const KvScales scales : {KvScales{0.02F, 3.0F}, {3.0F, 0.02F}}) {
    for (Shape shape : {Shape{KvCode::kFp8, 3, 1, 24, 8, 20},
                        {KvCode::kFp8, 2, 2, 136, 7, 0},
                        {KvCode::kFp8, 34, 2, 64, 16, 0, {70, 9}}}) {
      shape.scales = scales;
      const std::vector<double> exact = [&] {
        Shape wide = shape;
        wide.code = KvCode::kF32;
        wide.scales = {};
        return run(wide, nullptr, {1000, 1000}).cached(0);
      }();
      for (const std::string_view isa : cpu::supported_isas()) {
        SCOPED_TRACE(testing::Message()
                     << isa << " head_dim " << shape.head_dim << " k_scale " << scales.k);
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        const CachedRun whole = run(shape, backend.get(), {1000, 1000});
        const CachedRun pieces = run(shape, backend.get(), {41, 5});
        CachedRun expected(shape);
        expected.attend_over(whole.memory());
        expected.finish(nullptr, {1000, 1000});
        for (int s = 0; s < 2; ++s) {
          expect_near(whole.outputs(s), expected.outputs(s), tolerance_of(KvCode::kFp8));
          expect_same_bits(pieces.outputs(s), whole.outputs(s));
        }
        const std::vector<double> cached = whole.cached(0);
        ASSERT_EQ(cached.size(), exact.size());
        for (size_t i = 0; i < exact.size(); ++i) {  // half a unit of E4M3's last place
          const bool value = i / static_cast<size_t>(shape.head_dim) % 2 == 1;
          const double unit = (value ? scales.v : scales.k) * 0x1p-10;
          ASSERT_NEAR(cached[i], exact[i], std::max(std::fabs(exact[i]) * 0x1.01p-4, unit * 1.01))
              << "element " << i;
        }
      }
    }
  }
}

// Values of up to some 4000: without a scale they are cut at 448.
TEST(Attention, ScalesKeepLargeValuesOfFp8Caches) {
  const auto error = [](const KvScales& scales) {
    Shape shape{KvCode::kFp8, 4, 2, 64, 16, 0};
    CachedRun exact(Shape{KvCode::kF32, 4, 2, 64, 16, 0});
    exact.enlarge_values(1000.0F);
    exact.finish(nullptr, {1000, 1000});
    shape.scales = scales;
    CachedRun fp8(shape);
    fp8.enlarge_values(1000.0F);
    auto backend = make_cpu_backend({.threads = 2}).value();
    fp8.finish(backend.get(), {1000, 1000});
    double squares = 0.0;
    double all = 0.0;
    for (size_t i = 0; i < exact.outputs(0).size(); ++i) {
      squares += std::pow(fp8.outputs(0)[i] - exact.outputs(0)[i], 2);
      all += std::pow(exact.outputs(0)[i], 2);
    }
    return std::sqrt(squares / all);
  };
  EXPECT_GT(error({}), 0.3);
  EXPECT_LT(error({5.0F / 448.0F, 5000.0F / 448.0F}), 0.05);
}

// Prompts on both sides of the original length, and steps that end inside them.
TEST(Attention, DynamicRopeEqualsTheReferenceInAnyPieces) {
  for (const auto& [code, form] : kForms) {
    for (const auto& prompts : {std::array{100, 20}, {20, 100}, {150, 30}}) {
      Shape shape{code, 4, 2, 64, 16, 0, {150, 137}, DType::kF32, form, {30, 3.0}};
      std::ranges::copy(prompts, shape.prompts);
      SCOPED_TRACE(testing::Message() << "code " << static_cast<int>(code) << " form "
                                      << static_cast<int>(form) << " prompt " << prompts[0]);
      auto backend = make_cpu_backend({.threads = 2}).value();
      const CachedRun whole = run(shape, backend.get(), {1000, 1000});
      const CachedRun single = run(shape, backend.get(), {1, 1});
      const CachedRun pieces = run(shape, backend.get(), {41, 5});
      CachedRun expected(shape);
      expected.attend_over(whole.memory());
      expected.finish(nullptr, {1000, 1000});
      for (int s = 0; s < 2; ++s) {
        const double tolerance = form == AttentionForm::kShared ? 1.6e-2 : tolerance_of(code);
        expect_near(whole.outputs(s), expected.outputs(s), tolerance);
        expect_same_bits(single.outputs(s), whole.outputs(s));
        expect_same_bits(pieces.outputs(s), whole.outputs(s));
      }
      expect_same_bits(single.memory(), whole.memory());
      expect_same_bits(pieces.memory(), whole.memory());
      if (code == KvCode::kF32) {
        const std::vector<double> keys = whole.cached(0);
        const std::vector<double> exact = run(shape, nullptr, {1, 1}).cached(0);
        for (size_t i = 0; i < keys.size(); ++i) {
          ASSERT_NEAR(keys[i], exact[i], 2e-6) << "element " << i;
        }
      }
    }
  }
}

// Rotations in f32 and ties between lines may give other codes than the oracle's, but none that are
// further from the row.
TEST(Attention, CachesAreAsCloseAsTheReferences) {
  const auto squares = [](const std::vector<double>& a, const std::vector<double>& b, size_t begin,
                          size_t end) {
    double sum = 0.0;
    for (size_t i = begin; i < end; ++i) {
      sum += (a[i] - b[i]) * (a[i] - b[i]);
    }
    return sum;
  };
  for (const KvCode code :
       {KvCode::kF32, KvCode::kFp8, KvCode::kInt8, KvCode::kInt4, KvCode::kInt4Page}) {
    for (Shape shape : {Shape{code, 2, 2, 8, 16, 0}, Shape{code, 2, 2, 40, 7, 0},
                        Shape{code, 2, 2, 64, 16, 0}, Shape{code, 1, 1, 128, 16, 0}}) {
      SCOPED_TRACE(testing::Message()
                   << "code " << static_cast<int>(code) << " head_dim " << shape.head_dim);
      auto backend = make_cpu_backend({.threads = 2}).value();
      const std::vector<double> actual = run(shape, backend.get(), {1000, 1000}).cached(0);
      const std::vector<double> expected = run(shape, nullptr, {1000, 1000}).cached(0);
      shape.code = KvCode::kF32;
      const std::vector<double> exact = run(shape, nullptr, {1000, 1000}).cached(0);
      const auto dim = static_cast<size_t>(shape.head_dim);
      for (size_t i = 0; i < exact.size(); i += dim) {
        EXPECT_LE(squares(actual, exact, i, i + dim),
                  1.25 * squares(expected, exact, i, i + dim) + 1e-9)
            << "row " << i / dim;
      }
      const double error = squares(expected, exact, 0, exact.size());
      EXPECT_NEAR(squares(actual, exact, 0, exact.size()), error, 0.005 * error + 1e-7);
    }
  }
}

// All caches but F32 meet queries rounded to BF16, whatever they are in memory.
TEST(Attention, Bf16InAndOutEqualsF32RoundedOnce) {
  for (const KvCode code : kCodes) {
    for (Shape shape :
         {Shape{code, 4, 2, 64, 16, 0}, Shape{code, 3, 1, 24, 8, 20}, Shape{code, 2, 2, 136, 7, 0},
          Shape{code, 8, 1, 128, 16, 0}, Shape{code, 34, 2, 64, 16, 0, {70, 9}}}) {
      shape.activations = DType::kBF16;
      CachedRun expected(shape);
      CachedRun first(shape);
      for (const std::string_view isa : cpu::supported_isas()) {
        SCOPED_TRACE(testing::Message() << isa << " code " << static_cast<int>(code) << " head_dim "
                                        << shape.head_dim);
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        const CachedRun actual = run(shape, backend.get(), {1000, 1000});
        const CachedRun single = run(shape, backend.get(), {1, 1});
        if (isa == "scalar") {
          expected.wide_activations();
          expected.finish(backend.get(), {1000, 1000});
          first = actual;
        }
        for (int s = 0; s < 2; ++s) {
          if (code == KvCode::kF32) {
            expect_near(actual.outputs(s), expected.outputs(s), 2e-2);
          } else {
            expect_same_bits(actual.outputs(s), to_f32(to_bf16(expected.outputs(s))));
          }
          expect_same_bits(actual.outputs(s), first.outputs(s));
          expect_same_bits(single.outputs(s), first.outputs(s));
        }
        expect_same_bits(actual.memory(), expected.memory());
      }
    }
  }
}

// Scores of later keys are ever larger: rows' tops rise far above where they began, out of the
// range of weights, and most weights are the smallest.
TEST(Attention, GrowingScoresGiveTheSameBitsOnEveryInstructionSet) {
  for (const KvCode code : {KvCode::kBf16, KvCode::kFp8, KvCode::kInt8, KvCode::kInt4,
                            KvCode::kInt4Page, KvCode::kInt4Static}) {
    for (const Shape& shape :
         {Shape{code, 8, 1, 64, 16, 0, {400, 37}}, Shape{code, 2, 1, 32, 16, 100, {300, 150}}}) {
      SCOPED_TRACE(testing::Message() << "code " << static_cast<int>(code));
      const auto run_sharp = [&](Backend* backend, const int32_t(&counts)[2]) {
        CachedRun result(shape);
        result.sharpen(0.2F);
        result.finish(backend, counts);
        return result;
      };
      const CachedRun expected = run_sharp(nullptr, {1000, 1000});
      std::unique_ptr<CachedRun> first;
      for (const std::string_view isa : cpu::supported_isas()) {
        SCOPED_TRACE(isa);
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        auto whole = std::make_unique<CachedRun>(run_sharp(backend.get(), {1000, 1000}));
        const CachedRun single = run_sharp(backend.get(), {1, 1});
        const CachedRun pieces = run_sharp(backend.get(), {90, 33});
        for (int s = 0; s < 2; ++s) {
          if (code == KvCode::kBf16) {  // codes of others differ too much where rotations do
            expect_near(whole->outputs(s), expected.outputs(s), 0.1);
          }
          expect_same_bits(single.outputs(s), whole->outputs(s));
          expect_same_bits(pieces.outputs(s), whole->outputs(s));
          if (first != nullptr) {
            expect_same_bits(first->outputs(s), whole->outputs(s));
          }
        }
        first = std::move(whole);
      }
    }
  }
}

// Sums over 1024 keys are tasks of their own when there are few others.
TEST(Attention, LongContextsGiveTheSameBitsOnAnyThreads) {
  for (const KvCode code : {KvCode::kBf16, KvCode::kFp8, KvCode::kInt8, KvCode::kInt4,
                            KvCode::kInt4Page, KvCode::kInt4Static}) {
    for (Shape shape :
         {Shape{code, 8, 1, 64, 16, 0, {4200, 1030}}, Shape{code, 2, 2, 32, 16, 1500, {2600, 1}}}) {
      shape.sinks = shape.heads == 8 ? kSinks.data() : nullptr;
      SCOPED_TRACE(testing::Message() << "code " << static_cast<int>(code));
      auto filler = make_cpu_backend({.threads = 2}).value();
      CachedRun filled(shape);
      filled.step(filler.get(), {shape.lengths[0] - 5, shape.lengths[1]});
      CachedRun oracle = filled;
      oracle.rebase();
      oracle.finish(nullptr, {5, 5});
      std::vector<float> first;
      for (const std::string_view isa : cpu::supported_isas()) {
        for (const int threads : {1, 2, 3, 7}) {
          SCOPED_TRACE(testing::Message() << isa << " threads " << threads);
          auto backend =
              make_cpu_backend(
                  {.threads = threads, .isa = std::string(isa), .limit = ThreadLimit::kNone})
                  .value();
          CachedRun cached = filled;
          cached.rebase();
          cached.step(backend.get(), {2, 1});
          cached.finish(backend.get(), {1, 1});
          expect_near(cached.last_outputs(0, 5), oracle.last_outputs(0, 5), tolerance_of(code));
          if (first.empty()) {
            first = cached.last_outputs(0, 5);
          }
          expect_same_bits(cached.last_outputs(0, 5), first);
        }
      }
      const CachedRun whole = run(shape, filler.get(), {5000, 5000});
      expect_same_bits(whole.last_outputs(0, 5), first);
    }
  }
}

// Rows whose elements differ much, are alike, are tiny or give large scores; later ones are too
// large and become NaN.
TEST(Attention, ExtremeQueriesGiveTheSameBitsOnEveryInstructionSet) {
  for (const KvCode code : {KvCode::kInt8, KvCode::kInt4}) {
    for (const int64_t dim : {24, 64, 512}) {
      const Shape shape{code, 5, 1, dim, 16, 0, {90, 20}};
      const auto large = static_cast<std::ptrdiff_t>(60 * shape.heads * dim);
      std::vector<float> first;
      for (const std::string_view isa : cpu::supported_isas()) {
        SCOPED_TRACE(testing::Message() << isa << " code " << static_cast<int>(code));
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        CachedRun cached(shape);
        cached.change_queries([](int64_t token, int64_t element, float x) {
          const float kinds[] = {x, element % 64 == 3 ? 1000 * x : x, 1.99F, x * 1e-36F, 300 * x};
          return token < 60 ? kinds[token % 5] : 1e31F;
        });
        cached.finish(backend.get(), {37, 8});
        const auto is_nan = [](float y) { return std::isnan(y); };
        const std::vector<float>& outputs = cached.outputs(0);
        EXPECT_TRUE(std::none_of(outputs.begin(), outputs.begin() + large, is_nan));
        EXPECT_TRUE(std::all_of(outputs.begin() + large, outputs.end(), is_nan));
        const std::vector<float> finite(outputs.begin(), outputs.begin() + large);
        if (first.empty()) {
          first = finite;
        }
        expect_same_bits(first, finite);
      }
    }
  }
}

// A value that is not finite spoils its own sequence from its token on, and nothing else.
TEST(Attention, NonFiniteRowsStayWhereTheyAreSeen) {
  for (const KvCode code : kCodes) {
    if (code == KvCode::kInt4Static) {
      continue;  // no code says NaN: such numbers are counted (RangeReport)
    }
    const Shape shape{code, 4, 2, 64, 16, 0};
    for (const std::string_view isa : cpu::supported_isas()) {
      SCOPED_TRACE(testing::Message() << isa << " code " << static_cast<int>(code));
      auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
      const CachedRun clean = run(shape, backend.get(), {1000, 1000});
      for (const int64_t element : {int64_t{4 * 64 + 3}, int64_t{(4 + 2) * 64 + 5}}) {  // k, v
        CachedRun spoiled(shape);
        spoiled.spoil(0, 100, element);
        spoiled.finish(backend.get(), {1000, 1000});
        expect_same_bits(spoiled.outputs(1), clean.outputs(1));
        const std::vector<float>& outputs = spoiled.outputs(0);
        const auto before = static_cast<std::ptrdiff_t>(100 * 4 * 64);
        expect_same_bits({outputs.begin(), outputs.begin() + before},
                         {clean.outputs(0).begin(), clean.outputs(0).begin() + before});
        const auto nans = std::count_if(outputs.begin() + before, outputs.end(),
                                        [](float x) { return std::isnan(x); });
        EXPECT_GE(nans, 50 * 2);  // both heads that share the KV head, every later token
      }
    }
  }
}

TEST(Attention, ConstantRowsSurviveQuantizedCaches) {
  for (const KvCode code : kCodes) {
    if (kv_has_residual(code) || kv_format(code).per == KvParameters::kPerChannel) {
      continue;
    }
    KvView view{code, 4, 1, 16, nullptr};
    std::vector<float> memory(static_cast<size_t>(view.page_bytes() / 4), 0.0F);
    view.pages = reinterpret_cast<std::byte*>(memory.data());
    std::vector<float> qkv(48, 0.5F);
    std::vector<float> inv_freq(8, 1.0F);
    std::vector<float> out(16);
    const int32_t page = 0;
    const SequenceSpan span{0, 1, 1, &page};
    auto backend = make_cpu_backend({});
    ASSERT_TRUE(backend.ok());
    (*backend)->run_step({}, [&](Step& step) {
      step.rope_append_kv({qkv.data(), 48, 1, inv_freq.data(), 1.0F, view, {&span, 1}});
      step.attention({qkv.data(), 48, out.data(), 16, 1, 0.25F, 0, view, {&span, 1}});
    });
    // A single key has weight 1; INT8 rounds its product with the scale to BF16.
    const float tolerance = code == KvCode::kInt8 ? 1e-3F : 1e-6F;
    for (const float value : out) {
      EXPECT_NEAR(value, 0.5F, tolerance);
    }
  }
}

}  // namespace
}  // namespace nibble
