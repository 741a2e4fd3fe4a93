#include "quantizer/budget/loss_model.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(LossModel, MeasuredOnesHaveTheirOwnWeight) {
  const auto weights = loss_weights(std::vector<KnownLoss>{
      {.kind = "up", .error = 0.01, .kld = 0.002}, {.kind = "up", .error = 0.04, .kld = 0.002}});
  EXPECT_DOUBLE_EQ(weights[0], 0.2);
  EXPECT_DOUBLE_EQ(weights[1], 0.05);
}

TEST(LossModel, OthersAreAsTheTypicalOnesOfTheirKind) {
  const auto weights =
      loss_weights(std::vector<KnownLoss>{{.kind = "up", .error = 1, .kld = 50.0},
                                          {.kind = "up", .error = 1, .kld = 1.0, .typical = true},
                                          {.kind = "up", .error = 1},
                                          {.kind = "up", .error = 1, .kld = 9.0, .typical = true},
                                          {.kind = "up", .error = 1, .kld = 2.0, .typical = true},
                                          {.kind = "down", .error = 1, .kld = 8.0, .typical = true},
                                          {.kind = "down", .error = 1},
                                          {.kind = "experts", .error = 1}});
  EXPECT_DOUBLE_EQ(weights[2], 2.0);  // of 1, 2 and 9
  EXPECT_DOUBLE_EQ(weights[6], 8.0);
  EXPECT_DOUBLE_EQ(weights[7], 8.0);  // of 1, 2, 8, 9 and 50
}

TEST(LossModel, WithoutMeasurementsErrorsCountAsTheyAre) {
  const auto weights = loss_weights(std::vector<KnownLoss>{{.kind = "up", .error = 0.01},
                                                           {.kind = "down", .error = 0, .kld = 0}});
  EXPECT_EQ(weights, (std::vector<double>{1.0, 1.0}));
}

}  // namespace
}  // namespace nibble
