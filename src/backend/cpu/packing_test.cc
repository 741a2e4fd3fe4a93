#include "backend/cpu/packing.h"

#include <algorithm>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/testing/random_gemm.h"
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
