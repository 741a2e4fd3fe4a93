#include "layers/linear.h"

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

}  // namespace
}  // namespace nibble
