#include "backend/cpu/packing.h"

#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace nibble::cpu
