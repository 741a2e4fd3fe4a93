#include "layers/linear.h"

#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "backend/testing/random_gemm.h"
#include "quant/scheme.h"

namespace nibble {
namespace {

constexpr int64_t kK = 128;
constexpr int64_t kMost = 17;
constexpr int64_t kCounts[] = {48, 16, 33};  // rows of the parts

// Parts in one scheme or in several are what each is alone, whoever rounds the rows.
TEST(Linear, OfSeveralSchemesEqualsItsParts) {
  const auto backend = make_cpu_backend({.threads = 2}).value();
  const std::vector<float> x = random_floats(kMost * kK, 1);
  const std::vector<float> norm(kK, 0.5F);
  const std::vector<float> bias = random_floats(97, 3);
  using Names = std::vector<std::string_view>;
  for (const Names& names :
       {Names{"w4a8", "w4a8", "w4a8"}, Names{"w4a8", "w8a8_int8", "w4a8"},
        Names{"w8a8_fp8", "w8a8_int8", "w8a8_int8"}, Names{"w4a16_g32", "w8a16_channel", "bf16"}}) {
    std::vector<QuantTensor> weights;
    std::vector<MappedLinear> parts(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const QuantScheme scheme = find_scheme(names[i]).value();
      weights.push_back(
          random_weight(scheme.weight, {kCounts[i], kK}, static_cast<uint32_t>(i)).value());
      parts[i].act = scheme.act;
    }
    for (size_t i = 0; i < names.size(); ++i) {
      parts[i].weight = view_of(weights[i]);
    }
    Linear all = Linear::prepare(parts, bias, *backend, kMost).value();
    for (const int64_t m : {int64_t{1}, int64_t{3}, kMost}) {
      GemmArgs args{.x = x.data(), .m = m};
      args.input = {.kind = GemmInput::Kind::kRmsNorm, .norm_weight = norm.data(), .eps = 1e-5F};
      std::vector<float> y(static_cast<size_t>(m * all.n()),
                           std::numeric_limits<float>::quiet_NaN());
      args.y = y.data();
      all.forward(args);
      int64_t first = 0;
      for (size_t i = 0; i < names.size(); ++i) {
        Linear alone =
            Linear::prepare({&parts[i], 1}, {bias.data() + first, static_cast<size_t>(kCounts[i])},
                            *backend, kMost)
                .value();
        std::vector<float> expected(static_cast<size_t>(m * kCounts[i]));
        args.y = expected.data();
        alone.forward(args);
        for (int64_t row = 0; row < m; ++row) {
          const auto* got = y.data() + row * all.n() + first;
          EXPECT_TRUE(std::equal(got, got + kCounts[i], expected.begin() + row * kCounts[i]))
              << names[i] << " of " << names[0] << ", " << names[1] << ", row " << row << " of "
              << m;
        }
        first += kCounts[i];
      }
    }
  }
}

/// Notes the rows of products.
class Notes final : public RowObserver {
 public:
  explicit Notes(Then then) : then_(then) {}
  Then observe(Step& step, const InputRows& rows) override {
    seen.assign(static_cast<size_t>(step.rows() * rows.width),
                std::numeric_limits<float>::quiet_NaN());
    step.input_rows(rows, seen.data());
    return then_;
  }

  std::vector<float> seen;

 private:
  Then then_;
};

/// Runs fn within a step of `rows` rows.
void run_rows(Backend& backend, int32_t rows, const StepLayers& fn) {
  const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
  const SequenceSpan span{.q_begin = 0, .q_len = rows, .kv_len = rows};
  backend.run_step({.input = {tokens, {&span, 1}, {}}}, fn);
}

// What an observer sees is what the product rounds, and the product is the same with and without.
TEST(Linear, ShowsItsRowsToAnObserver) {
  const auto backend = make_cpu_backend({.threads = 2}).value();
  const QuantScheme scheme = find_scheme("w8a8_int8").value();
  const QuantTensor weight = random_weight(scheme.weight, {48, kK}, 1).value();
  const std::vector<float> norm = random_floats(kK, 2);
  const std::vector<float> bias = random_floats(kK, 4);
  MappedLinear part;
  part.act = scheme.act;
  part.weight = view_of(weight);
  Linear linear = Linear::prepare({&part, 1}, {}, *backend, kMost).value();
  using Kind = GemmInput::Kind;
  for (const Kind kind :
       {Kind::kPlain, Kind::kRmsNorm, Kind::kLayerNorm, Kind::kSiluMul, Kind::kRelu}) {
    const auto width = static_cast<size_t>(input_width(kind, kK));
    const std::vector<float> x = random_floats(static_cast<int64_t>(kMost * width), 5);
    std::vector<float> plain(kMost * 48, std::numeric_limits<float>::quiet_NaN());
    std::vector<float> observed = plain;
    GemmArgs args{.x = x.data(), .m = kMost, .y = plain.data()};
    args.input = {.kind = kind, .norm_weight = norm.data(), .eps = 1e-5F};
    args.input.norm_bias = kind == Kind::kLayerNorm ? bias.data() : nullptr;
    Notes notes(RowObserver::Then::kMultiply);
    Notes alone(RowObserver::Then::kSkip);
    run_rows(*backend, kMost, [&](Step& step) {
      ForwardContext context{.step = step, .rows = kMost};
      linear.forward(args, context);
      args.y = observed.data();
      context.observer = &notes;
      linear.forward(args, context);
      args.y = Activations();  // which is not written
      context.observer = &alone;
      linear.forward(args, context);
    });
    EXPECT_EQ(plain, observed);
    EXPECT_EQ(notes.seen, alone.seen);
    for (size_t row = 0; row < kMost; ++row) {
      const float* in = x.data() + row * width;
      double mean = 0;
      double square = 0;
      for (size_t i = 0; i < kK; ++i) {
        mean += static_cast<double>(in[i]) / kK;
        square += static_cast<double>(in[i]) * in[i] / kK;
      }
      for (size_t i = 0; i < kK; ++i) {
        double expected = in[i];
        if (kind == Kind::kRmsNorm) {
          expected = in[i] / std::sqrt(square + 1e-5) * norm[i];
        } else if (kind == Kind::kLayerNorm) {
          expected = (in[i] - mean) / std::sqrt(square - mean * mean + 1e-5) * norm[i] + bias[i];
        } else if (kind != Kind::kPlain) {
          expected = exact_activation(kind, in[i], width > kK ? in[kK + i] : 0);
        }
        EXPECT_NEAR(notes.seen[row * kK + i], expected, 1e-5 * (1 + std::fabs(expected)))
            << static_cast<int>(kind) << " row " << row << " column " << i;
      }
    }
  }
}

}  // namespace
}  // namespace nibble
