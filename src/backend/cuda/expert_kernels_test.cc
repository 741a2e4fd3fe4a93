// What the experts of a layer need besides products: routing and the lists of tiles.

#include "backend/cuda/expert_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "backend/testing/random_experts.h"
#include "base/f16.h"
#include "ops/route.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

std::vector<uint16_t> bf16_numbers(size_t count, uint32_t seed) {
  std::vector<uint16_t> numbers(count);
  std::ranges::transform(random_values(count, seed, 1.0F), numbers.begin(), f32_to_bf16);
  return numbers;
}

TEST(ExpertKernels, RoutingEqualsTheReference) {
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

/// Logits are those of a sum in double precision, and a row's have the same bits among any number
/// of rows, whichever kernel these take.
void check_logits(int32_t experts, int64_t hidden, int planes) {
  SCOPED_TRACE(fmt::format("{} experts of {}, {} planes", experts, hidden, planes));
  constexpr int64_t kMost = 1100;
  const auto x = bf16_numbers(static_cast<size_t>(kMost * hidden), 70);
  const int64_t plane = experts * hidden;
  const auto router = bf16_numbers(static_cast<size_t>(plane * planes), 71);
  const auto bias = random_values(static_cast<size_t>(experts), 72, 1.0F);
  const DeviceArray<uint16_t> device_x(x);
  const DeviceArray<uint16_t> device_router(router);
  const DeviceArray<float> device_bias(bias);
  std::vector<float> all;
  for (const int64_t rows : {1100, 1, 2, 3, 9, 16, 17, 24, 133, 160, 161}) {
    const DeviceArray<float> logits(std::vector<float>(static_cast<size_t>(rows * experts), NAN));
    ASSERT_EQ(router_logits({.x = device_x.data(),
                             .router = device_router.data(),
                             .planes = planes,
                             .bias = device_bias.data(),
                             .rows = rows,
                             .hidden = hidden,
                             .experts = experts,
                             .logits = logits.data()},
                            {}),
              cudaSuccess);
    const std::vector<float> got = logits.host();
    all = all.empty() ? got : all;
    ASSERT_EQ(std::memcmp(got.data(), all.data(), got.size() * sizeof(float)), 0) << rows;
  }
  for (const int64_t row : {int64_t{0}, int64_t{7}, kMost - 1}) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      double sum = bias[static_cast<size_t>(expert)];
      double size = std::fabs(sum);
      for (int64_t i = 0; i < planes * hidden; ++i) {
        const int64_t at = i / hidden * plane + expert * hidden + i % hidden;
        const double product =
            double{bf16_to_f32(x[static_cast<size_t>(row * hidden + i % hidden)])} *
            bf16_to_f32(router[static_cast<size_t>(at)]);
        sum += product;
        size += std::fabs(product);
      }
      EXPECT_NEAR(all[static_cast<size_t>(row * experts + expert)], sum, 4e-6 * size)
          << "row " << row << ", expert " << expert;
    }
  }
}

TEST(ExpertKernels, RowsHaveTheSameLogitsInAnyNumber) {
  NIBBLE_NEEDS_GPU();
  for (const int planes : {1, kRouterPlanes}) {
    check_logits(5, 64, planes);
    check_logits(16, 8, planes);
    check_logits(32, 2880, planes);
    check_logits(390, 520, planes);
  }
}

/// Rows behind those that are there take no expert, by the kernels for few rows and for many, and
/// the slots of the others are in order without gaps.
TEST(ExpertKernels, RowsThatOnlyFillAStepUpTakeNoExpert) {
  NIBBLE_NEEDS_GPU();
  constexpr int32_t kExperts = 16;
  constexpr int32_t kTopK = 3;
  for (const auto& [rows, there] : {std::pair{4, 3}, {4, 4}, {8, 5}, {24, 17}, {72, 1}, {2, 0}}) {
    SCOPED_TRACE(fmt::format("{} of {} rows", there, rows));
    const auto slots = static_cast<size_t>(rows * kTopK);
    const auto logits = random_values(static_cast<size_t>(rows * kExperts), 60, 2.0F);
    const DeviceArray<float> device_logits(logits);
    const DeviceArray<int32_t> count(std::vector<int32_t>{there});
    const DeviceArray<int32_t> chosen(std::vector<int32_t>(slots, 77));
    const DeviceArray<int32_t> slot_of(std::vector<int32_t>(slots, 77));
    const DeviceArray<int32_t> expert_of(std::vector<int32_t>(slots, 77));
    const DeviceArray<float> weights(std::vector<float>(slots, NAN));
    const DeviceArray<ExpertTile> tiles(2 * slots);
    const DeviceArray<int32_t> tile_count(3);
    ASSERT_EQ(route_and_sort({.logits = device_logits.data(),
                              .experts = kExperts,
                              .top_k = kTopK,
                              .rows = rows,
                              .chosen = chosen.data(),
                              .weights = weights.data(),
                              .slot_of = slot_of.data(),
                              .rows_there = count.data()},
                             {.chosen = chosen.data(),
                              .experts = kExperts,
                              .top_k = kTopK,
                              .rows = rows,
                              .cut = {.most = 8, .step = 8},
                              .slot_of = slot_of.data(),
                              .expert_of = expert_of.data(),
                              .tiles = tiles.data(),
                              .tile_count = tile_count.data(),
                              .max_tiles = static_cast<int64_t>(slots),
                              .slot_count = tile_count.data() + 2},
                             {}),
              cudaSuccess);
    const std::vector<int32_t> got = chosen.host();
    const std::vector<float> got_weights = weights.host();
    std::vector<int32_t> places = slot_of.host();
    const std::vector<int32_t> experts = expert_of.host();
    for (size_t i = 0; i < slots; ++i) {
      const bool is_there = i / kTopK < static_cast<size_t>(there);
      EXPECT_EQ(got[i] >= 0, is_there) << "slot " << i;
      EXPECT_LT(got[i], kExperts);
      EXPECT_EQ(places[i] != kNoSlot, is_there) << "slot " << i;
      if (is_there) {
        EXPECT_EQ(experts[static_cast<size_t>(places[i])], got[i]) << "slot " << i;
      }
      EXPECT_EQ(got_weights[i] != 0.0F, is_there) << "slot " << i;
    }
    std::erase(places, kNoSlot);
    std::ranges::sort(places);
    for (size_t i = 0; i < places.size(); ++i) {
      EXPECT_EQ(places[i], static_cast<int32_t>(i));
    }
    const std::vector<int32_t> counts = tile_count.host();
    const std::vector<ExpertTile> listed = tiles.host();
    EXPECT_EQ(counts[2], there * kTopK);
    int32_t rows_of_tiles = 0;
    for (int32_t i = 0; i < counts[0]; ++i) {
      rows_of_tiles += listed[static_cast<size_t>(i)].rows;
    }
    EXPECT_EQ(rows_of_tiles, there * kTopK);
  }
}

/// Slots of `rows` rows ordered on the GPU: three experts each.
struct SortedSlots {
  static constexpr int32_t kTopK = 3;
  std::vector<int32_t> chosen, slot_of, expert_of, tile_count;
  std::vector<ExpertTile> tiles;  // [2, max_tiles]
  int64_t max_tiles = 0;
  ExpertCounts counts;

  SortedSlots(std::vector<int32_t> chosen_experts, int32_t experts, const TileRows& cut)
      : chosen(std::move(chosen_experts)) {
    const auto slots = std::ssize(chosen);
    max_tiles = std::min<int64_t>(slots, std::min<int64_t>(experts, slots) + slots / cut.most);
    const DeviceArray<int32_t> device_chosen(chosen);
    const DeviceArray<int32_t> device_slot_of(chosen.size()), device_expert_of(chosen.size());
    const DeviceArray<ExpertTile> device_tiles(static_cast<size_t>(2 * max_tiles));
    const DeviceArray<int32_t> device_tile_count(2);
    const ExpertCounts before{.runs = 5, .active = 6, .slots = 7, .rows_max = 8};
    const DeviceArray<ExpertCounts> device_counts(std::vector<ExpertCounts>{before});
    EXPECT_EQ(sort_slots({.chosen = device_chosen.data(),
                          .experts = experts,
                          .top_k = kTopK,
                          .rows = slots / kTopK,
                          .cut = cut,
                          .slot_of = device_slot_of.data(),
                          .expert_of = device_expert_of.data(),
                          .tiles = device_tiles.data(),
                          .tile_count = device_tile_count.data(),
                          .max_tiles = max_tiles,
                          .counts = device_counts.data()},
                         {}),
              cudaSuccess);
    slot_of = device_slot_of.host();
    expert_of = device_expert_of.host();
    tile_count = device_tile_count.host();
    tiles = device_tiles.host();
    counts = device_counts.host()[0] - before;
  }
};

/// Every expert's slots are in tiles of one list, none in two, and as even as steps allow; the
/// first list begins with the largest.
void check_tiles(const SortedSlots& sorted,
                 const std::map<int32_t, int64_t>& rows_of,
                 const TileRows& cut) {
  std::map<int32_t, int64_t> first_of, seen, least, most;
  int64_t next = 0;
  for (const auto& [expert, rows] : rows_of) {
    first_of[expert] = next;
    next += rows;
  }
  for (int64_t list = 0; list < (cut.few > 0 ? 2 : 1); ++list) {
    int64_t before = cut.most;
    for (int64_t i = 0; i < sorted.max_tiles; ++i) {
      const ExpertTile& tile = sorted.tiles[static_cast<size_t>(list * sorted.max_tiles + i)];
      ASSERT_EQ(tile.rows > 0, i < sorted.tile_count[static_cast<size_t>(list)]) << i;
      if (tile.rows == 0) {
        continue;
      }
      ASSERT_TRUE(rows_of.contains(tile.expert));
      EXPECT_EQ(rows_of.at(tile.expert) <= cut.few, list == 1);
      EXPECT_EQ(tile.first, first_of[tile.expert] + seen[tile.expert]);
      seen[tile.expert] += tile.rows;
      const int64_t steps = (tile.rows + cut.step - 1) / cut.step * cut.step;
      EXPECT_LE(steps, std::max(cut.most, cut.few));
      const auto [smaller, is_new] = least.try_emplace(tile.expert, steps);
      smaller->second = std::min(smaller->second, steps);
      most[tile.expert] = std::max(most[tile.expert], steps);
      if (list == 0 && is_new) {
        EXPECT_LE(steps, before);
        before = steps;
      }
    }
  }
  EXPECT_EQ(seen, rows_of);
  for (const auto& [expert, rows] : rows_of) {
    EXPECT_LE(most[expert] - least[expert], cut.step) << rows << " rows";
  }
}

// All rows to the same experts, each expert to few, and some to one: every slot is in one tile of
// its expert.
TEST(ExpertKernels, SlotsAreOrderedByExpertThenRow) {
  NIBBLE_NEEDS_GPU();
  const auto expert_of = [](int64_t i, int64_t rows, int32_t experts) {
    if (rows == 700 && experts == 4) {
      return static_cast<int32_t>(i % 3);
    }
    const bool first = rows == 701 && i % 3 == 0 && i < 3 * 290;
    return first ? 2 : static_cast<int32_t>(i * 37 % experts);
  };
  for (const TileRows& cut : {TileRows{8, 8}, {256, 64}, {160, 32}, {16, 16, 8}, {64, 32, 16}}) {
    for (const int64_t rows : {1, 5, 700, 701}) {
      for (const int32_t experts : {4, 100, 1024}) {
        SCOPED_TRACE(::testing::Message() << cut.most << ", " << rows << " of " << experts);
        std::vector<int32_t> chosen;
        std::map<int32_t, int64_t> rows_of;
        for (int64_t i = 0; i < rows * SortedSlots::kTopK; ++i) {
          chosen.push_back(expert_of(i, rows, experts));
          ++rows_of[chosen.back()];
        }
        const SortedSlots sorted(chosen, experts, cut);
        ExpertCounts run{.runs = 1, .active = std::ssize(rows_of), .slots = std::ssize(chosen)};
        for (const auto& [expert, count] : rows_of) {
          run.rows_max = std::max(run.rows_max, count);
        }
        EXPECT_EQ(sorted.counts, run);
        std::vector<int32_t> order(chosen.size());
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, {},
                                 [&](int32_t slot) { return chosen[static_cast<size_t>(slot)]; });
        for (size_t at = 0; at < order.size(); ++at) {
          const auto slot = static_cast<size_t>(order[at]);
          EXPECT_EQ(sorted.slot_of[slot], static_cast<int32_t>(at));
          EXPECT_EQ(sorted.expert_of[at], chosen[slot]);
        }
        check_tiles(sorted, rows_of, cut);
      }
    }
  }
}

// Rows and scales to the places of their slots, of blocks with those of a row below each other;
// nothing is written between.
TEST(ExpertKernels, RowsAreCopiedWithTheirScales) {
  NIBBLE_NEEDS_GPU();
  constexpr int32_t kTopK = 3;
  constexpr int64_t kRowBytes = 96, kScales = 5;
  for (const int64_t rows : {1, 20, 1100}) {
    for (const bool below : {false, true}) {
      const auto slots = static_cast<size_t>(rows * kTopK);
      std::vector<int32_t> slot_of(slots);
      for (size_t i = 0; i < slots; ++i) {  // in another order, every fifth nowhere
        slot_of[i] = i % 5 == 2 ? kNoSlot : static_cast<int32_t>(slots - 1 - i);
      }
      const int64_t stride = rows + 4, slot_stride = rows * kTopK + 9;
      const auto scales =
          random_values(static_cast<size_t>(kScales * (below ? stride : rows)), 45, 1.0F);
      std::vector<uint8_t> from(static_cast<size_t>(rows * kRowBytes));
      std::ranges::generate(from,
                            [i = 0]() mutable { return static_cast<uint8_t>(++i * 7 % 251); });
      std::vector<uint8_t> to(slots * kRowBytes, 9);
      std::vector<float> slot_scales(
          static_cast<size_t>(kScales * (below ? slot_stride : rows * kTopK)), 9.0F);
      const DeviceArray<int32_t> device_slot_of(slot_of);
      const DeviceArray<uint8_t> device_from(from), device_to(to);
      const DeviceArray<float> device_scales(scales), device_slot_scales(slot_scales);
      ASSERT_EQ(scatter_rows({.from = device_from.data(),
                              .scales = device_scales.data(),
                              .row_scales = kScales,
                              .slot_of = device_slot_of.data(),
                              .top_k = kTopK,
                              .rows = rows,
                              .row_bytes = kRowBytes,
                              .to = device_to.data(),
                              .slot_scales = device_slot_scales.data(),
                              .scale_stride = below ? stride : 0,
                              .slot_scale_stride = below ? slot_stride : 0},
                             {}),
                cudaSuccess);
      for (size_t i = 0; i < slots; ++i) {
        const int64_t slot = slot_of[i], row = static_cast<int64_t>(i) / kTopK;
        if (slot == kNoSlot) {
          continue;
        }
        std::copy_n(from.begin() + row * kRowBytes, kRowBytes, to.begin() + slot * kRowBytes);
        for (int64_t s = 0; s < kScales; ++s) {
          const int64_t place = below ? s * slot_stride + slot : slot * kScales + s;
          slot_scales[static_cast<size_t>(place)] =
              scales[static_cast<size_t>(below ? s * stride + row : row * kScales + s)];
        }
      }
      EXPECT_TRUE(device_to.host() == to) << rows << " rows, " << below;
      EXPECT_TRUE(device_slot_scales.host() == slot_scales) << rows << " rows, " << below;
    }
  }
}

// y += the weighted results of the slots that are there, in the order of choice, and behind them
// what a branch of the step left, each sum rounded once.
TEST(ExpertKernels, ResultsAreAddedInTheirOrderThenWhatIsBeside) {
  NIBBLE_NEEDS_GPU();
  constexpr int32_t kTopK = 6;  // a round of four, and a part of one
  for (const int64_t rows : {1, 3, 64}) {
    for (const int64_t n : {4, 516, 7168}) {
      const int64_t stride = n + 8;
      const auto slots = static_cast<size_t>(rows * kTopK);
      std::vector<int32_t> slot_of(slots);
      for (size_t i = 0; i < slots; ++i) {  // in another order, every fifth nowhere
        slot_of[i] = i % 5 == 2 ? kNoSlot : static_cast<int32_t>(slots - 1 - i);
      }
      const auto results = random_values(slots * static_cast<size_t>(n), 41, 1.0F);
      const auto weights = random_values(slots, 42, 1.0F);
      const auto y = random_values(static_cast<size_t>(rows * stride), 43, 1.0F);
      const auto beside = random_values(static_cast<size_t>(rows * n), 44, 1.0F);
      const DeviceArray<float> device_results(results), device_weights(weights);
      const DeviceArray<float> device_y(y), device_beside(beside);
      const DeviceArray<int32_t> device_slot_of(slot_of);
      ASSERT_EQ(combine_slots({.results = device_results.data(),
                               .slot_of = device_slot_of.data(),
                               .weights = device_weights.data(),
                               .top_k = kTopK,
                               .rows = rows,
                               .n = n,
                               .y = device_y.data(),
                               .y_stride = stride,
                               .beside = device_beside.data()},
                              {}),
                cudaSuccess);
      std::vector<float> expected = y;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t j = 0; j < n; ++j) {
          float& sum = expected[static_cast<size_t>(row * stride + j)];
          for (int64_t i = row * kTopK; i < (row + 1) * kTopK; ++i) {
            const int64_t slot = slot_of[static_cast<size_t>(i)];
            if (slot != kNoSlot) {
              const float part =
                  results[static_cast<size_t>(slot * n + j)] * weights[static_cast<size_t>(i)];
              sum += part;
            }
          }
          sum += beside[static_cast<size_t>(row * n + j)];
        }
      }
      EXPECT_TRUE(device_y.host() == expected) << rows << " rows of " << n;
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
