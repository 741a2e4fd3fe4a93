#include "bench/moe/routing.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "bench/moe/expert_layer.h"
#include "bench/moe/steering.h"

namespace nibble {
namespace {

constexpr Routing kRoutings[] = {Routing::kUniform, Routing::kBalanced, Routing::kZipf,
                                 Routing::kOne};

std::vector<int64_t> rows_of_experts(const std::vector<int32_t>& chosen, int64_t experts) {
  std::vector<int64_t> rows(static_cast<size_t>(experts), 0);
  for (const int32_t expert : chosen) {
    ++rows[static_cast<size_t>(expert)];
  }
  return rows;
}

TEST(Routing, ExpertsOfARowDifferAndAreTheSameForMoreRows) {
  for (const Routing routing : kRoutings) {
    for (const int64_t top_k : {1, 3, 16}) {
      SCOPED_TRACE(std::string(routing_name(routing)) + " " + std::to_string(top_k));
      RoutingRequest request{.routing = routing, .experts = 16, .top_k = top_k, .rows = 50};
      const std::vector<int32_t> chosen = choose_experts(request);
      ASSERT_EQ(std::ssize(chosen), 50 * top_k);
      for (auto row = chosen.begin(); row != chosen.end(); row += top_k) {
        const std::set<int32_t> experts(row, row + top_k);
        EXPECT_EQ(std::ssize(experts), top_k);
        EXPECT_GE(*experts.begin(), 0);
        EXPECT_LT(*experts.rbegin(), 16);
      }
      request.rows = 7;
      const std::vector<int32_t> fewer = choose_experts(request);
      EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), chosen.begin()));
    }
  }
}

TEST(Routing, SharesRowsOutAsItsNameSays) {
  RoutingRequest request{.experts = 32, .top_k = 4, .rows = 4000};
  const auto load = [&](Routing routing) {
    request.routing = routing;
    return load_of(choose_experts(request), request.experts);
  };
  const ExpertLoad balanced = load(Routing::kBalanced);
  EXPECT_EQ(balanced.active, 32);
  EXPECT_EQ(balanced.most, 500);
  EXPECT_EQ(balanced.mean, 500.0);
  const ExpertLoad one = load(Routing::kOne);
  EXPECT_EQ(one.active, 4);
  EXPECT_EQ(one.most, 4000);
  EXPECT_EQ(one.mean, 4000.0);
  const ExpertLoad uniform = load(Routing::kUniform);
  EXPECT_EQ(uniform.active, 32);
  EXPECT_GT(uniform.most, 500);
  EXPECT_LT(uniform.most, 500 + 5 * 21);  // five deviations of 4000 draws with 1 of 8
  EXPECT_GT(load(Routing::kZipf).most, 2000);
  request.rows = 3;
  EXPECT_EQ(load(Routing::kBalanced).active, 12);
  request.rows = 9;
  const ExpertLoad uneven = load(Routing::kBalanced);
  EXPECT_EQ(uneven.active, 32);
  EXPECT_EQ(uneven.most, 2);
  EXPECT_EQ(uneven.mean, 36.0 / 32.0);
}

// The first draw of each row has the weights themselves: an oracle of the way of drawing.
TEST(Routing, ZipfDrawsByRank) {
  constexpr int64_t kRows = 200000;
  constexpr int64_t kExperts = 8;
  std::vector<int64_t> rows = rows_of_experts(
      choose_experts({.routing = Routing::kZipf, .experts = kExperts, .top_k = 1, .rows = kRows}),
      kExperts);
  std::ranges::sort(rows, std::greater());
  double sum = 0.0;
  for (int rank = 1; rank <= kExperts; ++rank) {
    sum += std::pow(rank, -1.2);
  }
  for (int rank = 1; rank <= kExperts; ++rank) {
    const double expected = kRows * std::pow(rank, -1.2) / sum;
    EXPECT_NEAR(static_cast<double>(rows[static_cast<size_t>(rank - 1)]), expected,
                5 * std::sqrt(expected));
  }
}

TEST(Routing, SeedsDiffer) {
  RoutingRequest request{.experts = 64, .top_k = 4, .rows = 20};
  const auto first = choose_experts(request);
  EXPECT_EQ(choose_experts(request), first);
  request.seed = 2;
  EXPECT_NE(choose_experts(request), first);
}

// A bias of expert e in column e alone shows in the results of the layer which experts were run.
TEST(Steering, TheLayerRunsTheChosenExperts) {
  constexpr int64_t kRows = 70;
  constexpr float kMark = 1e6F;
  const auto backend = make_cpu_backend({.threads = 2}).value();
  MoeShape layers[] = {find_moe_shape("gpt-oss-20b").value(), find_moe_shape("kimi-k2-ep8").value(),
                       find_moe_shape("qwen3-30b-a3b").value()};
  for (MoeShape& shape : layers) {
    shape.hidden = 160;
    shape.width = 32;
    for (const Routing routing : kRoutings) {
      SCOPED_TRACE(std::string(shape.name) + " " + std::string(routing_name(routing)));
      const auto chosen = choose_experts(
          {.routing = routing, .experts = shape.experts, .top_k = shape.top_k, .rows = kRows});
      const Buffer x = steered_rows({.chosen = chosen,
                                     .top_k = shape.top_k,
                                     .experts = shape.experts,
                                     .hidden = shape.hidden},
                                    1)
                           .value();
      const MoeWeights weights = MoeWeights::create(shape, all_schemes().front()).value();
      ExpertsRequest request = weights.request(kRows);
      std::vector<float> marks(static_cast<size_t>(shape.experts * shape.hidden), 0.0F);
      for (int64_t e = 0; e < shape.experts; ++e) {
        marks[static_cast<size_t>(e * shape.hidden + e)] = kMark;
      }
      request.down_bias = marks;
      const auto experts = backend->prepare_experts(request).value();
      std::vector<float> y(static_cast<size_t>(kRows * shape.hidden), 0.0F);
      experts->run({.x = {x.data(), DType::kBF16},
                    .x_stride = shape.hidden,
                    .m = kRows,
                    .y = y.data(),
                    .y_stride = shape.hidden});
      for (int64_t row = 0; row < kRows; ++row) {
        const auto first = chosen.begin() + row * shape.top_k;
        const std::set<int32_t> wanted(first, first + shape.top_k);
        std::set<int32_t> found;
        for (int32_t e = 0; e < shape.experts; ++e) {
          if (y[static_cast<size_t>(row * shape.hidden + e)] > kMark * 1e-2F) {
            found.insert(e);
          }
        }
        EXPECT_EQ(found, wanted) << "row " << row;
      }
    }
  }
}

TEST(MoeShape, RowsOfOneOfEightDevices) {
  const MoeShape shape = find_moe_shape("kimi-k2-ep8").value();
  EXPECT_EQ(shape.rows_of(1), 1);
  EXPECT_EQ(shape.rows_of(7), 1);
  EXPECT_EQ(shape.rows_of(64), 8);
  EXPECT_EQ(shape.rows_of(4096), 512);
  EXPECT_FALSE(shape.rows_note().empty());
  EXPECT_EQ(find_moe_shape("gpt-oss-20b").value().rows_of(7), 7);
}

TEST(MoeShape, WithoutARunAreRefused) {
  const MoeShape good{.experts = 8, .all_experts = 8, .top_k = 2, .hidden = 64, .width = 32};
  EXPECT_TRUE(check_moe_shape(good).ok());
  MoeShape shape = good;
  shape.top_k = 9;
  EXPECT_EQ(check_moe_shape(shape).code(), StatusCode::kInvalidArgument);
  shape = good;
  shape.experts = 96;
  EXPECT_EQ(check_moe_shape(shape).code(), StatusCode::kInvalidArgument);
  shape = good;
  shape.width = 40;
  EXPECT_EQ(check_moe_shape(shape).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
