#include "quant/quant_view.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(QuantView, ReadsScalesOfEveryTypeAtAnyAddress) {
  std::vector<std::byte> memory(9);
  QuantView view{.scales = memory.data() + 1};  // scales 2 and -0.5
  view.scale_type = DType::kF32;
  const float numbers[] = {2.0F, -0.5F};
  std::memcpy(memory.data() + 1, numbers, 8);
  EXPECT_EQ(view.scale(0), 2.0F);
  EXPECT_EQ(view.scale(1), -0.5F);
  view.scale_count = QuantView::Scales::kOneForAll;
  EXPECT_EQ(view.scale(1), 2.0F);
  view.scale_count = QuantView::Scales::kEach;
  view.scale_type = DType::kBF16;
  const uint16_t bf16[] = {0x4000, 0xbf00};
  std::memcpy(memory.data() + 1, bf16, 4);
  EXPECT_EQ(view.scale(0), 2.0F);
  EXPECT_EQ(view.scale(1), -0.5F);
  float both[2] = {};
  view.read_scales(0, both);
  EXPECT_EQ(both[0], 2.0F);
  EXPECT_EQ(both[1], -0.5F);
  view.read_scales(1, std::span(both).first(1));
  EXPECT_EQ(both[0], -0.5F);
  view.scale_count = QuantView::Scales::kOneForAll;
  view.read_scales(0, both);
  EXPECT_EQ(both[1], 2.0F);
  view.scale_count = QuantView::Scales::kEach;
  view.scale_type = DType::kF16;
  const uint16_t f16[] = {0x4000, 0xb800};
  std::memcpy(memory.data() + 1, f16, 4);
  EXPECT_EQ(view.scale(0), 2.0F);
  EXPECT_EQ(view.scale(1), -0.5F);
}

TEST(QuantView, ReadsPowersOfTwoOfRowsThatLieApart) {
  // Two rows of three groups, each followed by a row of another matrix.
  const uint8_t codes[12] = {127, 128, 126, 255, 255, 255, 0, 254, 130, 255, 255, 255};
  const QuantView view{.format = {WeightCode::kFp4E2M1, ScalePer::kGroup, 32, DType::kF8E8M0},
                       .n = 2,
                       .k = 96,
                       .scales = reinterpret_cast<const std::byte*>(codes),
                       .scale_type = DType::kF8E8M0,
                       .scale_stride = 6};
  const float expected[6] = {1.0F, 2.0F, 0.5F, 0x1p-127F, 0x1p127F, 8.0F};
  for (int64_t first = 0; first < 6; ++first) {
    for (int64_t count = 1; count <= 6 - first; ++count) {
      std::vector<float> got(static_cast<size_t>(count));
      view.read_scales(first, got);
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(got[static_cast<size_t>(i)], expected[first + i]);
        EXPECT_EQ(view.scale(first + i), expected[first + i]);
      }
    }
  }
}

TEST(QuantView, ReadsEveryPowerOfTwo) {
  std::vector<uint8_t> codes(256);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  const QuantView view{.scales = reinterpret_cast<const std::byte*>(codes.data()),
                       .scale_type = DType::kF8E8M0};
  std::vector<float> got(256);
  view.read_scales(0, got);
  for (size_t code = 0; code < 255; ++code) {
    EXPECT_EQ(got[code], std::ldexp(1.0F, static_cast<int>(code) - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(got[255]));
}

TEST(QuantView, MinimumsAreOfTheTypeOfTheScales) {
  const uint8_t codes[8] = {};
  const uint16_t scales[] = {0x3c00, 0x4000};   // 1 and 2 in F16
  const std::byte minimums[] = {std::byte{99},  // -0.5 and 3, at an odd address
                                std::byte{0}, std::byte{0xb8}, std::byte{0}, std::byte{0x42}};
  const QuantView view{
      .format = {WeightCode::kInt4, ScalePer::kGroup, 8, DType::kF16, ZeroPoints::kMinimum},
      .n = 1,
      .k = 16,
      .codes = reinterpret_cast<const std::byte*>(codes),
      .scales = reinterpret_cast<const std::byte*>(scales),
      .scale_type = DType::kF16,
      .minimums = minimums + 1};
  EXPECT_EQ(view.minimum(0), -0.5F);
  EXPECT_EQ(view.minimum(1), 3.0F);
  float last = 0;
  view.read_minimums(1, {&last, 1});
  EXPECT_EQ(last, 3.0F);
  const QuantTensor copy = copy_of(view).value();
  EXPECT_EQ(copy.zeros.size(), 0U);
  const QuantView again = view_of(copy);
  EXPECT_EQ(again.zeros, nullptr);
  EXPECT_EQ(again.minimum(0), -0.5F);
  EXPECT_EQ(again.minimum(1), 3.0F);
}

TEST(QuantView, CopiesAreCanonical) {
  const uint8_t codes[] = {0x10, 0xff, 0xff, 0xff, 0x32, 0xf4, 0xff, 0xff};
  const uint16_t scale = 0x3fc0;
  const QuantView view{.format = {WeightCode::kInt4, ScalePer::kChannel, 0, DType::kBF16},
                       .n = 2,
                       .k = 3,
                       .codes = reinterpret_cast<const std::byte*>(codes),
                       .scales = reinterpret_cast<const std::byte*>(&scale),
                       .scale_type = DType::kBF16,
                       .scale_count = QuantView::Scales::kOneForAll,
                       .name = "test"};
  const auto copy = copy_of(view);
  ASSERT_TRUE(copy.ok());
  const auto bytes = copy->codes.as<uint8_t>();
  EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.end()),
            (std::vector<uint8_t>{0x10, 0x0f, 0, 0, 0x32, 0x04, 0, 0}));
  const auto scales = copy->scales.as<float>();
  EXPECT_EQ(std::vector<float>(scales.begin(), scales.end()), (std::vector<float>{1.5F, 1.5F}));
  const QuantView again = view_of(*copy);
  EXPECT_EQ(again.n, 2);
  EXPECT_EQ(again.scale(1), 1.5F);
  QuantView odd = view;
  odd.format = {WeightCode::kInt4, ScalePer::kGroup, 2, DType::kBF16};
  EXPECT_EQ(copy_of(odd).status().code(), StatusCode::kUnsupported);
}

TEST(QuantView, CopiesOtherNibblesAsCanonicalOnes) {
  constexpr uint32_t kInOrder = 0x76543210U;
  constexpr uint32_t kReordered = 0x75316420U;  // slot i holds element 0 2 4 6 1 3 5 7
  constexpr uint32_t kFlip = 0x88888888U;
  for (const auto& [form, stored] : {std::pair(NibbleForm{.reordered = false}, kInOrder),
                                     std::pair(NibbleForm{.reordered = true}, kReordered),
                                     std::pair(NibbleForm{false, true}, kInOrder ^ kFlip),
                                     std::pair(NibbleForm{true, true}, kReordered ^ kFlip)}) {
    uint32_t words[2] = {stored, stored};
    QuantView view{.n = 2, .k = 8, .codes = reinterpret_cast<const std::byte*>(words)};
    view.nibbles = form;
    uint32_t copy = 0;
    view.copy_codes(4, 4, reinterpret_cast<std::byte*>(&copy));
    EXPECT_EQ(copy, kInOrder) << form.reordered << form.signed_code;
  }
}

TEST(QuantView, LongRunsOfNibblesAreThoseOfSingleWords) {
  constexpr size_t kWords = 45;  // of whole vectors and words behind them
  std::byte memory[4 * kWords + 1];
  for (size_t i = 0; i < sizeof(memory); ++i) {
    memory[i] = static_cast<std::byte>(i * 2654435761U >> 11U);
  }
  for (const NibbleForm form :
       {NibbleForm{}, NibbleForm{true, false}, NibbleForm{false, true}, NibbleForm{true, true}}) {
    std::byte copy[sizeof(memory)];
    std::memcpy(copy, memory, sizeof(memory));
    canonical_words(form, copy + 1, kWords, copy + 1);  // in place, aligned to nothing
    EXPECT_EQ(copy[0], memory[0]);
    for (size_t i = 0; i < kWords; ++i) {
      uint32_t word = 0;
      uint32_t got = 0;
      std::memcpy(&word, memory + 1 + 4 * i, 4);
      std::memcpy(&got, copy + 1 + 4 * i, 4);
      EXPECT_EQ(got, canonical_word(form, word)) << i << form.reordered << form.signed_code;
    }
  }
}

TEST(QuantView, RowsMayLieApart) {
  uint8_t codes[3 * 10];
  for (size_t i = 0; i < sizeof(codes); ++i) {
    codes[i] = static_cast<uint8_t>(i);
  }
  const QuantView view{.format = {WeightCode::kInt8, ScalePer::kNone},
                       .n = 3,
                       .k = 6,
                       .codes = reinterpret_cast<const std::byte*>(codes),
                       .row_stride = 10};
  EXPECT_EQ(view.code_row(2), view.codes + 20);
  std::vector<uint8_t> copy(11, 99);
  view.copy_codes(4, 10, reinterpret_cast<std::byte*>(copy.data()));  // parts of three rows
  EXPECT_EQ(copy, (std::vector<uint8_t>{4, 5, 10, 11, 12, 13, 14, 15, 20, 21, 99}));
  EXPECT_EQ(view_of(copy_of(view).value()).row_stride, 0);
}

TEST(QuantView, NibblesOfRowsThatLieApartAreCanonical) {
  constexpr uint32_t kFlipped = 0x76543210U ^ 0x88888888U;
  const uint32_t words[] = {kFlipped, 7, kFlipped, 7};
  QuantView view{.format = {WeightCode::kInt4, ScalePer::kNone},
                 .n = 2,
                 .k = 8,
                 .codes = reinterpret_cast<const std::byte*>(words),
                 .row_stride = 8};
  view.nibbles = {false, true};
  uint32_t copy[2] = {};
  view.copy_codes(0, 8, reinterpret_cast<std::byte*>(copy));
  EXPECT_EQ(copy[0], 0x76543210U);
  EXPECT_EQ(copy[1], 0x76543210U);
}

}  // namespace
}  // namespace nibble
