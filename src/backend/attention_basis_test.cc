#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "base/check.h"

namespace nibble {
namespace {

constexpr int64_t kHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kPageSize = 8;
constexpr float kAttentionFactor = 1.25F;

/// Queries, keys and values of one sequence, [tokens, kHeads + 2 kKvHeads, dim]; each channel of
/// keys and values has an offset.
struct Sequence {
  int64_t dim;
  int64_t window;  // 0: all
  int64_t tokens = 75;
  std::vector<float> qkv;
  std::vector<float> inv_freq;
  std::vector<float> key_mean;  // [kKvHeads, dim]
  std::vector<float> value_mean;

  Sequence(int64_t head_dim, int64_t seen) : dim(head_dim), window(seen) {
    std::mt19937 random(static_cast<uint32_t>(dim));
    std::normal_distribution<float> normal(0.0F, 1.0F);
    std::vector<float> offsets(static_cast<size_t>(width()));
    std::ranges::generate(offsets, [&] { return 3.0F * normal(random); });
    std::fill_n(offsets.begin(), kHeads * dim, 0.0F);
    for (int64_t i = 0; i < tokens * width(); ++i) {
      qkv.push_back(normal(random) + offsets[static_cast<size_t>(i % width())]);
    }
    for (int64_t i = 0; i < dim / 2; ++i) {  // the slower half does not turn within the sequence
      inv_freq.push_back(i < dim / 4 ? std::pow(0.1F, static_cast<float>(i % 4)) : 1e-6F);
    }
    const std::vector<double> keys = rotated();
    const auto mean_of = [&](const auto& rows, int64_t at) {
      double sum = 0;
      for (int64_t token = 0; token < tokens; ++token) {
        sum += static_cast<double>(rows[static_cast<size_t>(token * width() + at)]);
      }
      return static_cast<float>(sum / static_cast<double>(tokens));
    };
    for (int64_t i = 0; i < kKvHeads * dim; ++i) {
      key_mean.push_back(mean_of(keys, kHeads * dim + i));
      value_mean.push_back(mean_of(qkv, (kHeads + kKvHeads) * dim + i));
    }
  }

  [[nodiscard]] int64_t width() const { return (kHeads + 2 * kKvHeads) * dim; }

  [[nodiscard]] KvBasis basis(HeadForm form) const {
    return {.turns_keys = form.turned,
            .turns_values = form.turned,
            .key_mean = form.centred ? key_mean.data() : nullptr,
            .value_mean = form.centred ? value_mean.data() : nullptr};
  }

  /// With queries and keys rotated, in double precision.
  [[nodiscard]] std::vector<double> rotated() const {
    std::vector<double> out(qkv.begin(), qkv.end());
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t head = 0; head < kHeads + kKvHeads; ++head) {
        double* x = out.data() + token * width() + head * dim;
        for (int64_t i = 0; i < dim / 2; ++i) {
          const double angle = static_cast<double>(token) * inv_freq[static_cast<size_t>(i)];
          const double c = kAttentionFactor * std::cos(angle);
          const double s = kAttentionFactor * std::sin(angle);
          const double a = x[i], b = x[i + dim / 2];
          x[i] = a * c - b * s;
          x[i + dim / 2] = b * c + a * s;
        }
      }
    }
    return out;
  }

  /// Causal attention in double precision, without a cache: [tokens, kHeads, dim].
  [[nodiscard]] std::vector<double> exact() const {
    const std::vector<double> x = rotated();
    std::vector<double> out(static_cast<size_t>(tokens * kHeads * dim));
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t kv_head = head / (kHeads / kKvHeads);
        const double* q = x.data() + token * width() + head * dim;
        double* to = out.data() + (token * kHeads + head) * dim;
        double total = 0;
        for (int64_t t = window > 0 ? std::max<int64_t>(0, token - window + 1) : 0; t <= token;
             ++t) {
          const double* k = x.data() + t * width() + (kHeads + kv_head) * dim;
          const double* v = k + kKvHeads * dim;
          double dot = 0;
          for (int64_t d = 0; d < dim; ++d) {
            dot += q[d] * k[d];
          }
          const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim)) - 60);
          total += weight;
          for (int64_t d = 0; d < dim; ++d) {
            to[d] += weight * v[d];
          }
        }
        std::transform(to, to + dim, to, [total](double sum) { return sum / total; });
      }
    }
    return out;
  }

  /// The backend's attention over a cache of this format and basis, `chunk` tokens a step.
  [[nodiscard]] std::vector<float> run(Backend& backend,
                                       KvCode code,
                                       const KvBasis& basis,
                                       int64_t chunk) const {
    KvView kv{.code = code, .page_size = kPageSize, .kv_heads = kKvHeads, .head_dim = dim};
    const int64_t pages = (tokens + kPageSize - 1) / kPageSize;
    std::vector<float> memory(static_cast<size_t>(pages * kv.page_bytes() / 4));
    kv.pages = reinterpret_cast<std::byte*>(memory.data());
    kv.basis = basis;
    std::vector<int32_t> table;
    for (int64_t page = 0; page < pages; ++page) {
      table.push_back(static_cast<int32_t>(pages - 1 - page));
    }
    std::vector<float> rows = qkv;
    std::vector<float> out(static_cast<size_t>(tokens * kHeads * dim));
    for (int64_t first = 0; first < tokens; first += chunk) {
      const auto count = static_cast<int32_t>(std::min(chunk, tokens - first));
      const SequenceSpan span{0, count, static_cast<int32_t>(first) + count, table.data()};
      backend.run_step({}, [&](Step& step) {
        step.rope_append_kv({.qkv = rows.data() + first * width(),
                             .stride = width(),
                             .heads = kHeads,
                             .inv_freq = inv_freq.data(),
                             .attention_factor = kAttentionFactor,
                             .kv = kv,
                             .sequences = {&span, 1}});
        step.attention({.q = rows.data() + first * width(),
                        .q_stride = width(),
                        .out = out.data() + first * kHeads * dim,
                        .out_stride = kHeads * dim,
                        .heads = kHeads,
                        .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim))),
                        .sliding_window = window,
                        .kv = kv,
                        .sequences = {&span, 1}});
      });
    }
    return out;
  }
};

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, power = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(got[i] - want[i], 2);
    power += std::pow(want[i], 2);
  }
  return std::sqrt(error / power);
}

TEST(AttentionBasis, ChangesNothingOfUnquantizedCaches) {
  for (const int64_t window : {0, 20}) {
    for (const int64_t dim : {64, 24}) {
      const Sequence sequence(dim, window);
      const std::vector<double> exact = sequence.exact();
      for (const std::string_view isa : cpu::supported_isas()) {
        auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
        for (const HeadForm form : kHeadForms) {
          SCOPED_TRACE(testing::Message() << isa << " " << dim << " " << head_form_name(form));
          const KvBasis basis = sequence.basis(form);
          const auto wide = sequence.run(*backend, KvCode::kF32, basis, 1000);
          EXPECT_LT(relative_error(wide, exact), 1e-5);
          EXPECT_LT(relative_error(sequence.run(*backend, KvCode::kBf16, basis, 1000), exact),
                    0.02);
          const auto pieces = sequence.run(*backend, KvCode::kF32, basis, 7);
          EXPECT_TRUE(std::ranges::equal(pieces, wide, {}, std::bit_cast<uint32_t, float>,
                                         std::bit_cast<uint32_t, float>));
        }
      }
    }
  }
}

TEST(AttentionBasis, CentringSavesCodesWhereChannelsHaveOffsets) {
  const Sequence sequence(64, 0);
  const std::vector<double> exact = sequence.exact();
  std::vector<float> first[kHeadForms.size()];
  for (const std::string_view isa : cpu::supported_isas()) {
    auto backend = make_cpu_backend({.threads = 2, .isa = std::string(isa)}).value();
    const auto error_of = [&](HeadForm form) {
      const auto out = sequence.run(*backend, KvCode::kInt4, sequence.basis(form), 1000);
      EXPECT_EQ(sequence.run(*backend, KvCode::kInt4, sequence.basis(form), 1), out);
      std::vector<float>& other = first[head_form_index(form)];
      other = other.empty() ? out : other;
      EXPECT_EQ(out, other) << isa;
      return relative_error(out, exact);
    };
    const double plain = error_of({});
    EXPECT_LT(error_of({.centred = true}), 0.6 * plain);
    EXPECT_LT(error_of({.centred = true, .turned = true}), 0.5 * error_of({.turned = true}));
  }
}

TEST(AttentionBasis, KeysAndValuesAreChangedApart) {
  const Sequence sequence(64, 20);
  const std::vector<double> exact = sequence.exact();
  auto backend = make_cpu_backend({.threads = 1}).value();
  for (const HeadForm keys : kHeadForms) {
    for (const HeadForm values : kHeadForms) {
      KvBasis basis = sequence.basis(keys);
      basis.turns_values = values.turned;
      basis.value_mean = sequence.basis(values).value_mean;
      EXPECT_LT(relative_error(sequence.run(*backend, KvCode::kF32, basis, 1000), exact), 1e-5)
          << head_form_name(keys) << " " << head_form_name(values);
    }
  }
}

TEST(CheckKv, PagesOfChannelsHoldWholeGroups) {
  const auto backend = make_cpu_backend({}).value();
  KvView view{.code = KvCode::kInt4Page, .page_size = 48, .kv_heads = 2, .head_dim = 64};
  const Status status = backend->check_kv(view, 4);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("not of 48; choose --block-size 64"), std::string::npos)
      << status.message();
  view.page_size = backend->preferred_page_size(view.code);
  EXPECT_TRUE(backend->check_kv(view, 4).ok());
  view = {.code = KvCode::kInt4, .page_size = 48, .kv_heads = 2, .head_dim = 64};
  EXPECT_TRUE(backend->check_kv(view, 4).ok());
}

TEST(AttentionBasis, SinksAndAMeanOfValuesDoNotGoTogether) {
  auto backend = make_cpu_backend({.threads = 1}).value();
  const std::vector<float> numbers(1024);
  KvView kv{.code = KvCode::kF32, .page_size = 8, .kv_heads = 1, .head_dim = 64};
  kv.basis.value_mean = numbers.data();
  EXPECT_THROW(
      backend->run_step(
          {}, [&](Step& step) { step.attention({.heads = 1, .kv = kv, .sinks = numbers.data()}); }),
      InternalError);
}

}  // namespace
}  // namespace nibble
