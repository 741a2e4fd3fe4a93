#include "backend/cpu/packing.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/testing/random_gemm.h"
#include "base/f16.h"
#include "quant/scheme.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kRows = 37;
constexpr int64_t kColumns = 264;

/// Canonical words as a checkpoint with nibbles in `form` holds them.
std::vector<uint32_t> stored_words(NibbleForm form, const QuantTensor& weight) {
  constexpr int kElement[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  std::vector<uint32_t> words;
  for (const uint32_t canonical : weight.codes.as<uint32_t>()) {
    uint32_t word = 0;
    for (int slot = 0; slot < 8; ++slot) {
      const int element = form.reordered ? kElement[slot] : slot;
      const uint32_t code = canonical >> (4 * element) & 15U;
      word |= (form.signed_code ? code ^ 8U : code) << (4 * slot);
    }
    words.push_back(word);
  }
  return words;
}

TEST(PackedMatrix, TakesNibblesInEveryForm) {
  const WeightFormat format{WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
  QuantTensor weight = QuantTensor::allocate(format, kRows, kColumns).value();
  std::mt19937 random(3);
  std::ranges::generate(weight.codes.as<uint32_t>(),
                        [&] { return static_cast<uint32_t>(random()); });
  std::ranges::fill(weight.scales.as<float>(), 0.5F);
  ThreadPool pool(2);
  BufferArena arena;
  for (const ActFormat act : {ActFormat::kFloat, ActFormat::kInt8Token}) {
    for (const NibbleForm form : {NibbleForm{false, false}, NibbleForm{false, true},
                                  NibbleForm{true, false}, NibbleForm{true, true}}) {
      SCOPED_TRACE(testing::Message() << form.reordered << form.signed_code);
      const std::vector<uint32_t> words = stored_words(form, weight);
      QuantView view = view_of(weight);
      view.codes = reinterpret_cast<const std::byte*>(words.data());
      view.nibbles = form;
      const PackedMatrix packed = PackedMatrix::create({&view, 1}, act, arena, pool).value();
      const QuantTensor unpacked = packed.unpack().value();
      EXPECT_TRUE(std::ranges::equal(unpacked.codes.as<uint32_t>(), weight.codes.as<uint32_t>()));
    }
  }
}

// Every second row of a fused matrix, in every code that a scheme has.
TEST(PackedMatrix, TakesRowsThatLieApart) {
  ThreadPool pool(2);
  BufferArena arena;
  for (const QuantScheme& scheme : all_schemes()) {
    const QuantTensor weight = random_weight(scheme.weight, {kRows, 256}, 4).value();
    const auto bytes = static_cast<size_t>(weight.row_bytes());
    std::vector<std::byte> fused(2 * kRows * bytes, std::byte{0x7f});  // NaN in E4M3
    for (size_t row = 0; row < kRows; ++row) {
      std::copy_n(weight.codes.data() + row * bytes, bytes, fused.data() + 2 * row * bytes);
    }
    QuantView view = view_of(weight);
    view.codes = fused.data();
    view.row_stride = 2 * weight.row_bytes();
    const auto packed = PackedMatrix::create({&view, 1}, scheme.act, arena, pool);
    ASSERT_TRUE(packed.ok()) << packed.status().message();
    const QuantTensor unpacked = packed->unpack().value();
    EXPECT_TRUE(std::ranges::equal(unpacked.codes.as<uint8_t>(), weight.codes.as<uint8_t>()))
        << scheme.name;
  }
}

/// Scales and minimums of a tensor in F16, as files have them.
struct Halves {
  std::vector<uint16_t> scales, minimums;

  explicit Halves(const QuantTensor& weight)
      : scales(halves(weight.scales)), minimums(halves(weight.minimums)) {}
  static std::vector<uint16_t> halves(const Buffer& numbers) {
    std::vector<uint16_t> out(numbers.size() / 4);
    std::ranges::transform(numbers.as<float>(), out.begin(), f32_to_f16);
    return out;
  }
  [[nodiscard]] QuantView view(const QuantTensor& weight) const {
    QuantView view = view_of(weight);
    view.scales = reinterpret_cast<const std::byte*>(scales.data());
    view.scale_type = DType::kF16;
    if (!minimums.empty()) {
      view.minimums = reinterpret_cast<const std::byte*>(minimums.data());
    }
    return view;
  }
};

// An even and an odd number of groups take ways of their own; part of the rows is replaced, too.
TEST(PackedMatrix, KeepsScalesAndMinimumsInF16) {
  ThreadPool pool(2);
  BufferArena arena;
  for (const auto& [code, zero_points] : {std::pair(WeightCode::kInt4, ZeroPoints::kNone),
                                          std::pair(WeightCode::kInt4, ZeroPoints::kMinimum),
                                          std::pair(WeightCode::kInt8, ZeroPoints::kNone)}) {
    const WeightFormat format{code, ScalePer::kGroup, 32, DType::kF16, zero_points};
    for (const int64_t k : {64, 96}) {
      const QuantTensor weight = random_weight(format, {kRows, k}, 4).value();
      const Halves halves(weight);
      const QuantView stored = halves.view(weight), wide = view_of(weight);
      for (const QuantView& view : {stored, wide}) {
        PackedMatrix packed =
            PackedMatrix::create({&view, 1}, ActFormat::kBf16, arena, pool).value();
        EXPECT_EQ(packed.view().scale_type, ScaleType::kF16);
        const QuantTensor unpacked = packed.unpack().value();
        EXPECT_TRUE(std::ranges::equal(unpacked.codes.as<uint8_t>(), weight.codes.as<uint8_t>()));
        EXPECT_TRUE(std::ranges::equal(unpacked.scales.as<float>(), weight.scales.as<float>()));
        EXPECT_TRUE(std::ranges::equal(unpacked.minimums.as<float>(), weight.minimums.as<float>()));
        const QuantTensor some = random_weight(format, {20, k}, 5).value();
        ASSERT_TRUE(packed.update(3, Halves(some).view(some), pool).ok());
        const QuantTensor updated = packed.unpack().value();
        const auto groups = static_cast<size_t>(k / 32);
        const auto rows_are = [&](size_t first, size_t rows, const QuantTensor& from, size_t at) {
          const auto same = [&](const Buffer& a, const Buffer& b) {
            return std::ranges::equal(a.as<float>().subspan(first * groups, rows * groups),
                                      b.as<float>().subspan(at * groups, rows * groups));
          };
          return same(updated.scales, from.scales) &&
                 (format.zero_points == ZeroPoints::kNone || same(updated.minimums, from.minimums));
        };
        EXPECT_TRUE(rows_are(0, 3, weight, 0));
        EXPECT_TRUE(rows_are(3, 20, some, 0));
        EXPECT_TRUE(rows_are(23, kRows - 23, weight, 23));
      }
    }
  }
}

TEST(PackedMatrix, TakesF32WhereF16LacksANumber) {
  ThreadPool pool(2);
  BufferArena arena;
  const auto type_of = [&](const QuantTensor& weight, ActFormat act) {
    const QuantView view = view_of(weight);
    return PackedMatrix::create({&view, 1}, act, arena, pool).value().view().scale_type;
  };
  const WeightFormat format{WeightCode::kInt4, ScalePer::kGroup, 32, DType::kF16,
                            ZeroPoints::kMinimum};
  QuantTensor weight = random_weight(format, {kRows, 64}, 4).value();
  const QuantView before = view_of(weight);
  PackedMatrix packed = PackedMatrix::create({&before, 1}, ActFormat::kBf16, arena, pool).value();
  weight.minimums.as<float>()[70] = 1.0F + 0x1p-12F;
  EXPECT_EQ(type_of(weight, ActFormat::kBf16), ScaleType::kF32);
  const Status refused = packed.update(0, view_of(weight), pool);
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), testing::HasSubstr("not representable in F16"));
  weight.minimums.as<float>()[70] = 1.0F;
  weight.scales.as<float>()[9] = 1e6F;
  EXPECT_EQ(type_of(weight, ActFormat::kBf16), ScaleType::kF32);
  // Kernels want scales of FP8 times 256.
  const WeightFormat fp8{WeightCode::kFp8E4M3, ScalePer::kChannel, 0, DType::kF16};
  EXPECT_EQ(type_of(random_weight(fp8, {kRows, 64}, 4).value(), ActFormat::kFp8Token),
            ScaleType::kF32);
}

TEST(PackedMatrix, RefusesNanCodesByName) {
  const WeightFormat format{WeightCode::kFp8E4M3, ScalePer::kChannel, 0, DType::kF32};
  QuantTensor weight = QuantTensor::allocate(format, kRows, kColumns).value();
  std::ranges::fill(weight.codes.as<uint8_t>(), uint8_t{0x38});
  std::ranges::fill(weight.scales.as<float>(), 1.0F);
  QuantView view = view_of(weight);
  view.name = "model.safetensors: tensor m.weight";
  ThreadPool pool(2);
  BufferArena arena;
  EXPECT_TRUE(PackedMatrix::create({&view, 1}, ActFormat::kFp8Token, arena, pool).ok());
  weight.codes.as<uint8_t>()[kColumns + 5] = 0xff;
  const auto packed = PackedMatrix::create({&view, 1}, ActFormat::kFp8Token, arena, pool);
  EXPECT_EQ(packed.status().code(), StatusCode::kCorrupt);
  EXPECT_THAT(packed.status().message(), testing::HasSubstr("tensor m.weight: contains NaN"));
}

}  // namespace
}  // namespace nibble::cpu
