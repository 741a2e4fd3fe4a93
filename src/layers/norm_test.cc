#include "layers/norm.h"

#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

std::unique_ptr<Backend> backend() { return make_cpu_backend({.threads = 1}).value(); }

TEST(Norm, RowsOfTheHostAsByHand) {
  const auto device = backend();
  const std::vector<float> weight = {1, 2, -1, 0.5F};
  // mean of squares 7.5, and 0.25
  std::vector<float> rows = {1, 2, 3, 4, 0.5F, -0.5F, 0.5F, -0.5F};
  Norm(device->upload(weight).value(), 0.0).apply(*device, rows);
  const std::vector<float> expected = {0.3651484F, 1.4605935F, -1.0954451F, 0.7302967F,
                                       1,          -2,         -1,          -0.5F};
  ASSERT_EQ(rows.size(), expected.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_FLOAT_EQ(rows[i], expected[i]) << i;
  }
}

TEST(Norm, LayersAreCentredAndHaveABias) {
  const auto device = backend();
  const std::vector<float> weight = {1, 1, 2, 1};
  const std::vector<float> bias = {0, 0, 1, -1};
  std::vector<float> rows = {1, 2, 3, 4};  // mean 2.5, variance 1.25, to which 0.19 comes
  Norm(device->upload(weight).value(), device->upload(bias).value(), 0.19).apply(*device, rows);
  const std::vector<float> expected = {-1.25F, -0.41666667F, 1.8333334F, 0.25F};
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_FLOAT_EQ(rows[i], expected[i]) << i;
  }
}

}  // namespace
}  // namespace nibble
