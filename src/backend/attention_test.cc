#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"

namespace nibble {
namespace {

constexpr KvCode kCodes[] = {KvCode::kF32, KvCode::kBf16, KvCode::kInt8, KvCode::kInt4};

struct Shape {
  KvCode code;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t page_size;
  int64_t window;
};

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

/// Two sequences over shuffled pages, filled in steps; keeps outputs of every token.
class CachedRun {
 public:
  static constexpr int32_t kLengths[2] = {150, 37};
  static constexpr int32_t kPages = 48;

  explicit CachedRun(const Shape& shape) : shape_(shape) {
    view_.code = shape.code;
    view_.page_size = shape.page_size;
    view_.kv_heads = shape.kv_heads;
    view_.head_dim = shape.head_dim;
    memory_.assign(static_cast<size_t>(kPages * view_.page_bytes() / 4),
                   std::numeric_limits<float>::quiet_NaN());
    view_.pages = reinterpret_cast<std::byte*>(memory_.data());
    row_ = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    width_ = shape.heads * shape.head_dim;
    for (int32_t s = 0; s < 2; ++s) {
      for (int32_t i = 0; i < kPages / 2; ++i) {
        tables_[s].push_back((i * 7 + 3) % (kPages / 2) * 2 + s);  // 7 and 24 are coprime
      }
      inputs_[s] = random_floats(kLengths[s] * row_, 11U + static_cast<uint32_t>(s));
      outputs_[s].assign(static_cast<size_t>(kLengths[s] * width_), 0.0F);
    }
    for (int64_t i = 0; i < shape.head_dim / 2; ++i) {
      inv_freq_.push_back(
          std::pow(10000.0F, -2.0F * static_cast<float>(i) / static_cast<float>(shape.head_dim)));
    }
  }

  /// Feeds the next counts[s] tokens of each sequence as one batch; no backend: the oracle.
  void step(Backend* backend, const int32_t (&counts)[2]) {
    std::vector<float> qkv;
    std::vector<SequenceSpan> spans;
    int32_t rows = 0;
    for (int32_t s = 0; s < 2; ++s) {
      const int32_t count = std::min(counts[s], kLengths[s] - done_[s]);
      qkv.insert(qkv.end(), inputs_[s].begin() + done_[s] * row_,
                 inputs_[s].begin() + (done_[s] + count) * row_);
      spans.push_back({rows, count, done_[s] + count, tables_[s].data()});
      rows += count;
      done_[s] += count;
    }
    std::vector<float> out(static_cast<size_t>(rows * width_),
                           std::numeric_limits<float>::quiet_NaN());
    const RopeAppendArgs rope{qkv.data(), row_,  shape_.heads, inv_freq_.data(),
                              1.25F,      view_, spans};
    const AttentionArgs attention{
        qkv.data(),    row_,         out.data(),
        width_,        shape_.heads, 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
        shape_.window, view_,        spans};
    if (backend == nullptr) {
      reference_rope_append(rope);
      reference_attention(attention);
    } else {
      backend->rope_append_kv(rope);
      backend->attention(attention);
    }
    for (int32_t s = 0; s < 2; ++s) {
      const SequenceSpan& span = spans[static_cast<size_t>(s)];
      std::copy_n(out.begin() + span.q_begin * width_, span.q_len * width_,
                  outputs_[s].begin() + (done_[s] - span.q_len) * width_);
    }
  }

  void finish(Backend* backend, const int32_t (&counts)[2]) {
    while (done_[0] < kLengths[0] || done_[1] < kLengths[1]) {
      step(backend, counts);
    }
  }

  [[nodiscard]] const std::vector<float>& outputs(int s) const { return outputs_[s]; }
  [[nodiscard]] const std::vector<float>& memory() const { return memory_; }

 private:
  Shape shape_;
  KvView view_;
  int64_t row_ = 0;
  int64_t width_ = 0;
  std::vector<float> memory_;
  std::vector<float> inv_freq_;
  std::vector<int32_t> tables_[2];
  std::vector<float> inputs_[2];
  std::vector<float> outputs_[2];
  int32_t done_[2] = {0, 0};
};

/// Rotations in f32 may move a value across a rounding boundary of the cache's codes.
double tolerance_of(KvCode code) {
  switch (code) {
    case KvCode::kF32:
      return 2e-5;
    case KvCode::kBf16:
      return 4e-3;
    case KvCode::kInt8:
      return 8e-3;
    case KvCode::kInt4:
      return 8e-2;
  }
  return 0.0;
}

void expect_same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
}

TEST(Attention, EqualsTheReferenceInAnyPiecesOnEveryInstructionSet) {
  for (const KvCode code : kCodes) {
    for (const Shape& shape : {Shape{code, 4, 2, 64, 16, 0}, Shape{code, 3, 1, 24, 8, 20},
                               Shape{code, 2, 2, 136, 7, 0}, Shape{code, 6, 1, 80, 16, 64}}) {
      SCOPED_TRACE(testing::Message() << "code " << static_cast<int>(code) << " head_dim "
                                      << shape.head_dim << " window " << shape.window);
      CachedRun expected(shape);
      expected.finish(nullptr, {1000, 1000});
      std::unique_ptr<CachedRun> first;
      for (const std::string_view isa : cpu::supported_isas()) {
        SCOPED_TRACE(isa);
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)});
        ASSERT_TRUE(backend.ok());
        auto whole = std::make_unique<CachedRun>(shape);
        whole->finish(backend->get(), {1000, 1000});
        for (int s = 0; s < 2; ++s) {
          for (size_t i = 0; i < expected.outputs(s).size(); ++i) {
            ASSERT_NEAR(whole->outputs(s)[i], expected.outputs(s)[i], tolerance_of(code))
                << "sequence " << s << " element " << i;
          }
        }
        CachedRun single(shape);
        single.finish(backend->get(), {1, 1});
        CachedRun pieces(shape);
        pieces.finish(backend->get(), {41, 5});
        for (int s = 0; s < 2; ++s) {
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

TEST(Attention, ConstantRowsSurviveQuantizedCaches) {
  for (const KvCode code : kCodes) {
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
    (*backend)->rope_append_kv({qkv.data(), 48, 1, inv_freq.data(), 1.0F, view, {&span, 1}});
    (*backend)->attention({qkv.data(), 48, out.data(), 16, 1, 0.25F, 0, view, {&span, 1}});
    for (const float value : out) {
      EXPECT_NEAR(value, 0.5F, 1e-6F);
    }
  }
}

TEST(RowKernels, EqualTheirFormulasOnEveryInstructionSet) {
  constexpr int64_t kRows = 3;
  for (const int64_t n : {1, 16, 37, 4096}) {
    const std::vector<float> x = random_floats(kRows * 2 * n, 5);
    const std::vector<float> weight = random_floats(n, 6);
    std::vector<float> first;
    for (const std::string_view isa : cpu::supported_isas()) {
      auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)});
      std::vector<float> norm(static_cast<size_t>(kRows * n));
      std::vector<float> silu(norm.size());
      (*backend)->rms_norm(x.data(), kRows, n, weight.data(), 1e-5F, norm.data());
      (*backend)->silu_mul(x.data(), kRows, n, silu.data());
      for (int64_t r = 0; r < kRows; ++r) {
        double squares = 0.0;
        for (int64_t i = 0; i < n; ++i) {
          squares += std::pow(static_cast<double>(x[static_cast<size_t>(r * n + i)]), 2);
        }
        const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
        for (int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<size_t>(r * n + i);
          const double expected = x[at] * factor * weight[static_cast<size_t>(i)];
          ASSERT_NEAR(norm[at], expected, 1e-6 + 2e-6 * std::fabs(expected));
          const double gate = x[static_cast<size_t>(2 * r * n + i)];
          const double product =
              gate / (1.0 + std::exp(-gate)) * x[static_cast<size_t>((2 * r + 1) * n + i)];
          ASSERT_NEAR(silu[at], product, 1e-7 + 1e-6 * std::fabs(product));
        }
      }
      std::vector<float> all = norm;
      all.insert(all.end(), silu.begin(), silu.end());
      (*backend)->add_bias(norm.data(), kRows, n, weight.data());
      for (size_t i = 0; i < norm.size(); ++i) {
        ASSERT_EQ(norm[i], all[i] + weight[i % static_cast<size_t>(n)]);
      }
      if (!first.empty()) {
        expect_same_bits(first, all);
      }
      first = all;
    }
  }
}

TEST(RowKernels, SiluKeepsItsLimits) {
  const float gates[] = {-1000.0F, -90.0F, 0.0F, 90.0F, 1000.0F};
  for (const std::string_view isa : cpu::supported_isas()) {
    auto backend = make_cpu_backend({.threads = 1, .isa = std::string(isa)});
    for (const float gate : gates) {
      const float pair[] = {gate, 1.0F};
      float y = std::numeric_limits<float>::quiet_NaN();
      (*backend)->silu_mul(pair, 1, 1, &y);
      EXPECT_NEAR(y, gate > 0.0F ? gate : 0.0F, 1e-30F);
    }
  }
}

}  // namespace
}  // namespace nibble
