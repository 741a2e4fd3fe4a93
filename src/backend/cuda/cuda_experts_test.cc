// Experts on the GPU against ops/reference.

#include "backend/cuda/cuda_experts.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_experts.h"
#include "ops/route.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

/// y [m, hidden] of rows that held 1 before.
std::vector<float> run(PreparedExperts& experts,
                       const std::vector<uint16_t>& x,
                       int64_t m,
                       int64_t hidden) {
  const DeviceArray<uint16_t> rows(x);
  const DeviceArray<float> y(std::vector<float>(static_cast<size_t>(m * hidden), 1.0F));
  experts.run({.x = {rows.data(), DType::kBF16},
               .x_stride = hidden,
               .m = m,
               .y = y.data(),
               .y_stride = hidden});
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return y.host();
}

std::vector<float> expected_of(const ReferenceExperts& weights,
                               const std::vector<uint16_t>& x,
                               int64_t m) {
  const int64_t hidden = weights.router.k;
  std::vector<float> y(static_cast<size_t>(m * hidden), 1.0F);
  reference_experts(weights, {.x = {x.data(), DType::kBF16},
                              .x_stride = hidden,
                              .m = m,
                              .y = y.data(),
                              .y_stride = hidden});
  return y;
}

TEST(CudaExperts, OfEverySchemeEqualTheReference) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  for (const char* name :
       {"bf16", "w8a16_channel", "w4a16_g32", "w4a16_g128", "w4a16_g32_asym", "mxfp4", "w4a8",
        "w8a8_int8", "w8a8_fp8", "w8a8_fp8_expert", "w8a8_fp8_block"}) {
    const QuantScheme scheme = find_scheme(name).value();
    for (const ExpertsShape& shape : {ExpertsShape{6, 2, 256, 128}, {40, 3, 128, 192}}) {
      SCOPED_TRACE(::testing::Message() << name << " of " << shape.experts);
      const bool whole_groups = scheme.weight.scale_per == ScalePer::kGroup;
      if (whole_groups && shape.width % std::max(1, scheme.weight.group_size) != 0) {
        continue;
      }
      RandomExperts layer(scheme, shape, DType::kBF16);
      const bool many = shape.experts == 40;
      if (many) {
        layer.add_biases();
        layer.weights.form.activation = GemmInput::Kind::kClampedSwiglu;
        layer.weights.form.limit = 7.0F;
        layer.weights.form.router.scores = RouterScores::kSoftmaxOfChosen;
      } else {
        layer.weights.form.router.renormalise = true;
      }
      constexpr int64_t kRows = 400;
      const auto x = to_bf16(random_values(static_cast<size_t>(kRows * shape.hidden), 7, 1.0F));
      const std::vector<float> expected = expected_of(layer.weights, x, kRows);
      auto experts = backend->prepare_experts(layer.request(kRows));
      ASSERT_TRUE(experts.ok()) << experts.status().message();
      const std::vector<float> whole = run(**experts, x, kRows, shape.hidden);
      // The tensor cores cut sums of E4M3 at 14 bits. Where that changes a row's maximum on its way
      // through BF16, the row is rounded by another scale: by a model of these sums, up to 3.5e-2
      // of a single row and 9e-3 of many.
      const bool single_rows_differ = scheme.act == ActFormat::kFp8Token;
      const double tolerance = single_rows_differ ? 5e-2 : 1e-2;
      EXPECT_LT(relative_error(whole, expected), single_rows_differ ? 2e-2 : 1e-2);
      for (const int64_t m : {1, 3, 17, 40, 150}) {
        const std::vector<float> fewer = run(**experts, x, m, shape.hidden);
        const std::vector<float> first(expected.begin(), expected.begin() + m * shape.hidden);
        EXPECT_LT(relative_error(fewer, first), tolerance) << "m = " << m;
        if (scheme.act == ActFormat::kInt8Token) {
          EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), whole.begin())) << "m = " << m;
        }
      }
    }
  }
}

TEST(CudaExperts, AreUnpackedAndReplacedOneByOne) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  RandomExperts layer(scheme, {4, 2, 128, 64}, DType::kBF16);
  auto experts = backend->prepare_experts(layer.request(8)).value();
  for (int64_t e = 0; e < 4; ++e) {
    const QuantTensor got = experts->unpack(e, ExpertPart::kDown).value();
    const QuantTensor& given = layer.weights.down[static_cast<size_t>(e)];
    EXPECT_TRUE(std::ranges::equal(got.codes.as<uint8_t>(), given.codes.as<uint8_t>()));
  }
  layer.weights.gate_up[2] = random_weight(scheme.weight, {128, 128}, 99).value();
  ASSERT_TRUE(experts->update(2, ExpertPart::kGateUp, 0, layer.weights.gate_up[2]).ok());
  const auto x = to_bf16(random_values(8 * 128, 6, 1.0F));
  EXPECT_LT(relative_error(run(*experts, x, 8, 128), expected_of(layer.weights, x, 8)), 1e-2);
  EXPECT_EQ(experts->update(4, ExpertPart::kDown, 0, layer.weights.down[3]).code(),
            StatusCode::kInvalidArgument);
}

// 144 MiB of gate and up: more than are on their way to the GPU at once.
TEST(CudaExperts, OfAnyNumberArePacked) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kExperts = 48;
  const auto backend = make_cuda_backend({}).value();
  RandomExperts layer(find_scheme("bf16").value(), {kExperts, 2, 1024, 768}, DType::kBF16);
  auto experts = backend->prepare_experts(layer.request(1)).value();
  const auto expect_as_given = [&](int64_t expert) {
    const auto at = static_cast<size_t>(expert);
    const QuantTensor gate_up = experts->unpack(expert, ExpertPart::kGateUp).value();
    const QuantTensor down = experts->unpack(expert, ExpertPart::kDown).value();
    EXPECT_TRUE(std::ranges::equal(gate_up.codes.as<uint8_t>(),
                                   layer.weights.gate_up[at].codes.as<uint8_t>()))
        << expert;
    EXPECT_TRUE(
        std::ranges::equal(down.codes.as<uint8_t>(), layer.weights.down[at].codes.as<uint8_t>()))
        << expert;
  };
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    expect_as_given(expert);
  }
  const WeightFormat format = find_scheme("bf16").value().weight;
  layer.weights.down[20] = random_weight(format, {1024, 768}, 99).value();
  ASSERT_TRUE(experts->update(20, ExpertPart::kDown, 0, layer.weights.down[20]).ok());
  for (const int64_t expert : {19, 20, 21}) {  // and its neighbours stay
    expect_as_given(expert);
  }
}

TEST(CudaExperts, WithoutKernelsAreRefused) {
  NIBBLE_NEEDS_GPU();
  const auto backend = make_cuda_backend({}).value();
  RandomExperts layer(find_scheme("w4a16_channel").value(), {4, 2, 128, 64}, DType::kBF16);
  const Status refused = backend->prepare_experts(layer.request(8)).status();
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_NE(refused.message().find("--device cpu"), std::string::npos);
}

TEST(CudaExperts, RoutingEqualsTheReference) {
  NIBBLE_NEEDS_GPU();
  constexpr int64_t kRows = 33;
  const RouterForm forms[] = {
      {.renormalise = true},
      {.scores = RouterScores::kSoftmaxOfChosen},
      {.scores = RouterScores::kSigmoid, .renormalise = true, .epsilon = 1e-20F, .factor = 2.5F},
      {.scores = RouterScores::kSigmoid, .factor = 2.0F, .groups = 8, .kept_groups = 4}};
  uint32_t seed = 20;
  for (const RouterForm& form : forms) {
    for (const size_t experts : {32, 256, 384}) {
      constexpr size_t kTopK = 8;
      const auto logits = random_values(kRows * experts, ++seed, 2.0F);
      const auto correction = random_values(experts, ++seed, 1.0F);
      const bool corrected = form.scores == RouterScores::kSigmoid;
      const DeviceArray<float> device_logits(logits);
      const DeviceArray<float> device_correction(correction);
      const DeviceArray<int32_t> chosen(kRows * kTopK);
      const DeviceArray<float> weights(kRows * kTopK);
      ASSERT_EQ(route_rows({.logits = device_logits.data(),
                            .correction = corrected ? device_correction.data() : nullptr,
                            .form = form,
                            .experts = static_cast<int32_t>(experts),
                            .top_k = kTopK,
                            .rows = kRows,
                            .chosen = chosen.data(),
                            .weights = weights.data()},
                           {}),
                cudaSuccess);
      const std::vector<int32_t> got = chosen.host();
      const std::vector<float> got_weights = weights.host();
      for (size_t row = 0; row < kRows; ++row) {
        std::vector<int32_t> expected(kTopK);
        std::vector<float> expected_weights(kTopK);
        reference_route({.logits = std::span(logits).subspan(row * experts, experts),
                         .correction = corrected ? std::span<const float>(correction)
                                                 : std::span<const float>(),
                         .form = form,
                         .chosen = expected,
                         .weights = expected_weights});
        for (size_t i = 0; i < kTopK; ++i) {
          EXPECT_EQ(got[row * kTopK + i], expected[i]) << experts << " row " << row;
          EXPECT_NEAR(got_weights[row * kTopK + i], expected_weights[i], 2e-6F * form.factor);
        }
      }
    }
  }
}

// All rows to the same experts, and each expert to few: every slot is in one tile of its expert.
TEST(CudaExperts, SlotsAreOrderedByExpertThenRow) {
  NIBBLE_NEEDS_GPU();
  for (const int64_t rows : {1, 5, 700}) {
    for (const int32_t experts : {4, 100, 1024}) {
      constexpr int32_t kTopK = 3;
      std::vector<int32_t> chosen;
      for (int64_t i = 0; i < rows * kTopK; ++i) {
        chosen.push_back(rows == 700 && experts == 4 ? static_cast<int32_t>(i % 3)
                                                     : static_cast<int32_t>(i * 37 % experts));
      }
      const int64_t slots = rows * kTopK;
      const int64_t max_tiles =
          std::min<int64_t>(slots, std::min<int64_t>(experts, slots) + slots / 8);
      const DeviceArray<int32_t> device_chosen(chosen);
      const DeviceArray<int32_t> slot_of(static_cast<size_t>(slots));
      const DeviceArray<ExpertTile> tiles(static_cast<size_t>(max_tiles));
      const DeviceArray<int32_t> tile_count(1);
      ASSERT_EQ(sort_slots({.chosen = device_chosen.data(),
                            .experts = experts,
                            .top_k = kTopK,
                            .rows = rows,
                            .tile_rows = 8,
                            .slot_of = slot_of.data(),
                            .tiles = tiles.data(),
                            .tile_count = tile_count.data(),
                            .max_tiles = max_tiles},
                           {}),
                cudaSuccess);
      std::vector<int32_t> order(static_cast<size_t>(slots));
      std::iota(order.begin(), order.end(), 0);
      std::ranges::stable_sort(order, {},
                               [&](int32_t slot) { return chosen[static_cast<size_t>(slot)]; });
      const std::vector<int32_t> got_slots = slot_of.host();
      for (int64_t at = 0; at < slots; ++at) {
        const int32_t slot = order[static_cast<size_t>(at)];
        EXPECT_EQ(got_slots[static_cast<size_t>(slot)], at);
      }
      int64_t next = 0;
      for (const ExpertTile& tile : tiles.host()) {
        EXPECT_LE(tile.rows, 8);
        if (tile.rows > 0) {
          EXPECT_EQ(tile.first, next);
        }
        for (int32_t r = 0; r < tile.rows; ++r, ++next) {
          EXPECT_EQ(chosen[static_cast<size_t>(order[static_cast<size_t>(next)])], tile.expert);
        }
      }
      EXPECT_EQ(next, slots);
      const auto used =
          std::ranges::count_if(tiles.host(), [](const ExpertTile& tile) { return tile.rows > 0; });
      EXPECT_EQ(tile_count.host()[0], used);
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
