#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_experts.h"
#include "core/expert_share.h"
#include "quant/scheme.h"

namespace nibble {
namespace {

constexpr ExpertsShape kShape{12, 3, 128, 128};
constexpr int64_t kRows = 37;

std::unique_ptr<Backend> make_backend() {
  return make_cpu_backend({.threads = 3, .isa = "auto", .limit = ThreadLimit::kNone}).value();
}

/// What the experts add to rows of x, and to which rows they add something.
std::vector<float> added(Backend& backend, const ExpertsRequest& request, const void* x) {
  std::vector<float> y(static_cast<size_t>(kRows * kShape.hidden), 0.0F);
  const auto experts = backend.prepare_experts(request).value();
  experts->run({.x = ConstActivations(x, DType::kBF16),
                .x_stride = kShape.hidden,
                .m = kRows,
                .y = y.data(),
                .y_stride = kShape.hidden});
  return y;
}

TEST(ExpertShares, AddUpToTheWholeLayer) {
  for (const QuantScheme& scheme : all_schemes()) {
    RandomExperts layer(scheme, kShape, DType::kBF16);
    layer.add_biases();
    layer.weights.correction.assign(kShape.experts, 0.0F);
    layer.weights.correction[4] = 0.3F;
    layer.weights.form.router = {.scores = RouterScores::kSigmoid,
                                 .renormalise = true,
                                 .factor = 2.5F,
                                 .groups = 4,
                                 .kept_groups = 2};
    const auto x = to_bf16(random_floats(kRows * kShape.hidden, 5));
    const auto backend = make_backend();
    const ExpertsRequest whole = layer.request(kRows);
    const std::vector<float> expected = added(*backend, whole, x.data());
    for (const int64_t ranks : {1, 2, 4, 12}) {
      SCOPED_TRACE(testing::Message() << scheme.name << ", " << ranks << " ranks");
      std::vector<double> sum(expected.size());
      const int64_t before = backend->expert_counts().slots;
      int64_t untouched = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto y = added(*backend, share_of(whole, {.rank = rank, .ranks = ranks}), x.data());
        std::ranges::transform(y, sum, sum.begin(), std::plus<>());
        for (int64_t row = 0; row < kRows; ++row) {
          const auto begin = y.begin() + row * kShape.hidden;
          untouched += std::all_of(begin, begin + kShape.hidden, [](float v) { return v == 0; });
        }
      }
      // Every slot is some rank's, and a rank adds nothing to rows whose experts others have.
      EXPECT_EQ(backend->expert_counts().slots - before, kRows * kShape.top_k);
      EXPECT_GE(untouched, ranks == 12 ? (ranks - kShape.top_k) * kRows : 0);
      double error = 0;
      double largest = 0;
      for (size_t i = 0; i < sum.size(); ++i) {
        error = std::max(error, std::abs(sum[i] - static_cast<double>(expected[i])));
        largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
      }
      EXPECT_LT(error, 1e-6 * largest);  // of F32 sums in another order
    }
  }
}

TEST(ExpertShares, ThatAreNotTheRoutersAreRefused) {
  RandomExperts layer(find_scheme("bf16").value(), kShape, DType::kBF16);
  const auto backend = make_backend();
  ExpertsRequest request = share_of(layer.request(kRows), {.rank = 3, .ranks = 4});
  request.first_expert = 10;  // of 12, with 3 experts
  EXPECT_EQ(backend->prepare_experts(request).status().code(), StatusCode::kInvalidArgument);
  request.first_expert = -1;
  EXPECT_EQ(backend->prepare_experts(request).status().code(), StatusCode::kInvalidArgument);
}

TEST(ExpertShares, DivideExpertsEvenly) {
  EXPECT_TRUE((ExpertShare{.rank = 7, .ranks = 8}.divides(384)));
  EXPECT_FALSE((ExpertShare{.rank = 0, .ranks = 7}.divides(384)));
  EXPECT_FALSE((ExpertShare{.rank = 8, .ranks = 8}.divides(384)));
  EXPECT_EQ((ExpertShare{.rank = 7, .ranks = 8}.first(384)), 336);
  EXPECT_EQ((ExpertShare{.rank = 7, .ranks = 8}.count(384)), 48);
}

}  // namespace
}  // namespace nibble
