#include "quantizer/budget/loss_model.h"

#include <cmath>

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(LossModel, MeasuredOnesHaveTheirOwnWeight) {
  const auto weights =
      loss_weights(std::vector<KnownLoss>{{.kind = "up", .layer = 0, .error = 0.01, .kld = 0.002},
                                          {.kind = "up", .layer = 1, .error = 0.04, .kld = 0.002}});
  EXPECT_DOUBLE_EQ(weights[0], 0.2);
  EXPECT_DOUBLE_EQ(weights[1], 0.05);
}

TEST(LossModel, OthersLieBetweenTheNearestLayersOfTheirKind) {
  const auto weights =
      loss_weights(std::vector<KnownLoss>{{.kind = "up", .layer = 0, .error = 1, .kld = 50.0},
                                          {.kind = "up", .layer = 7, .error = 1, .kld = 0.01},
                                          {.kind = "up", .layer = 3, .error = 1},
                                          {.kind = "up", .layer = 2, .error = 1, .kld = 1.0},
                                          {.kind = "up", .layer = 4, .error = 1, .kld = 4.0},
                                          {.kind = "up", .layer = 1, .error = 1},
                                          {.kind = "up", .layer = 6, .error = 1},
                                          {.kind = "down", .layer = 3, .error = 1, .kld = 8.0},
                                          {.kind = "down", .layer = 1, .error = 1, .kld = 2.0},
                                          {.kind = "down", .layer = 2, .error = 1},
                                          {.kind = "experts", .layer = 3, .error = 1}});
  EXPECT_NEAR(weights[2], 2.0, 1e-12);  // between 1 and 4
  EXPECT_NEAR(weights[5], 1.0, 1e-12);  // as layer 2: layer 0 stands for itself
  EXPECT_NEAR(weights[6], 4.0, 1e-12);  // as layer 4
  EXPECT_NEAR(weights[9], 4.0, 1e-12);  // between 2 and 8: there is nothing else
  EXPECT_NEAR(weights[10], std::pow(50.0 * 0.01 * 4.0 * 16.0, 1.0 / 6), 1e-12);
}

TEST(LossModel, WithoutMeasurementsErrorsCountAsTheyAre) {
  const auto weights =
      loss_weights(std::vector<KnownLoss>{{.kind = "up", .layer = 0, .error = 0.01},
                                          {.kind = "down", .layer = 0, .error = 0, .kld = 0}});
  EXPECT_EQ(weights, (std::vector<double>{1.0, 1.0}));
}

}  // namespace
}  // namespace nibble
