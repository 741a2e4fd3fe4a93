#include "quantizer/algorithms/activations.h"

#include <algorithm>
#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quantizer/algorithms/testing/rounding_problem.h"

namespace nibble {
namespace {

TEST(Activations, InBlocksAreCodesTimesTheirScale) {
  const BlockPrecision blocks{.block = 32, .bits = {8, 4, 4}, .clip = 0.8F};
  const std::vector<float> x = gaussian(blocks.k(), 1);
  for (const ScalePer per : {ScalePer::kGroup, ScalePer::kChannel}) {
    WeightFormat weight{.code = WeightCode::kInt4, .scale_per = per};
    weight.group_size = per == ScalePer::kGroup ? 32 : 0;
    ActSpec act(ActFormat::kIntBlocks);
    act.blocks = std::make_shared<const BlockPrecision>(blocks);
    std::vector<float> row = x;
    round_row(RowForm(act, weight), row.data(), blocks.k());
    std::vector<int8_t> codes(x.size());
    float scales[3];
    round_blocks(blocks, block_scales_of(weight, act.format), x.data(), {codes.data(), scales});
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t block = i / 32;
      const float scale = scales[per == ScalePer::kGroup ? block : 0];
      EXPECT_EQ(row[i], static_cast<float>(codes[i]) * scale) << i;
    }
  }
}

TEST(Activations, OneBlockIsRoundedAsAmongOthers) {
  const BlockPrecision blocks{.block = 64, .bits = {4, 8}, .clip = 0.7F};
  std::vector<float> row = gaussian(blocks.k(), 2);
  std::vector<float> alone = row;
  ActSpec act(ActFormat::kIntBlocks);
  act.blocks = std::make_shared<const BlockPrecision>(blocks);
  RowForm form(ActFormat::kIntBlocks);
  form.act = act;
  round_row(form, row.data(), blocks.k());
  float* second = alone.data() + 64;
  round_block(block_codes(4, 0.7F, largest_magnitude(alone.data(), 64)), alone.data(), 64);
  round_block(block_codes(8, 1.0F, largest_magnitude(second, 64)), second, 64);
  EXPECT_EQ(row, alone);
}

TEST(Activations, BlocksInBf16AreRoundedAsAmongOthers) {
  const BlockPrecision blocks{.block = 64, .bits = {8, 16, 8}};
  std::vector<float> row = gaussian(blocks.k(), 3);
  row[70] = 40;
  std::vector<float> alone = row;
  ActSpec act(ActFormat::kBf16Blocks);
  act.blocks = std::make_shared<const BlockPrecision>(blocks);
  const WeightFormat weight{.code = WeightCode::kInt4, .scale_per = ScalePer::kChannel};
  round_row(RowForm(act, weight), row.data(), blocks.k());
  float* x = alone.data();
  const BlockCodes eight =
      block_codes(8, 1.0F, std::max(largest_magnitude(x, 64), largest_magnitude(x + 128, 64)));
  round_block(eight, x, 64);
  round_to_fixed(fixed_unit(40), x + 64, 64);
  round_block(eight, x + 128, 64);
  EXPECT_EQ(row, alone);
  EXPECT_EQ(row[70], 40);
}

TEST(Activations, ChannelsAreReadInTheOrderOfTheColumns) {
  ThreadPool pool(2);
  std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  order_channels({2, 0, 1}, {rows.data(), 2, 3}, pool);
  EXPECT_THAT(rows, testing::ElementsAre(3, 1, 2, 6, 4, 5));
}

}  // namespace
}  // namespace nibble
