#include "checkpoint/finite.h"

#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

struct Pattern {
  DType dtype;
  size_t bytes;
  uint32_t bits;
  std::string text;  // empty: a number
};

const std::vector<Pattern> kPatterns = {
    {DType::kF32, 4, 0x7fc00000, "nan"}, {DType::kF32, 4, 0xff800000, "-inf"},
    {DType::kF32, 4, 0x7f800001, "nan"}, {DType::kF32, 4, 0x7f7fffff, ""},
    {DType::kBF16, 2, 0x7f80, "inf"},    {DType::kBF16, 2, 0x7fc0, "nan"},
    {DType::kBF16, 2, 0xff7f, ""},       {DType::kF16, 2, 0x7c00, "inf"},
    {DType::kF16, 2, 0x7e00, "nan"},     {DType::kF16, 2, 0x7bff, ""},
    {DType::kF8E4M3, 1, 0x7f, "nan"},    {DType::kF8E4M3, 1, 0xff, "nan"},
    {DType::kF8E4M3, 1, 0x7e, ""},       {DType::kI32, 4, 0x7fc00000, ""},
    {DType::kU8, 1, 0xff, ""},           {DType::kF8E8M0, 1, 0xff, "nan"},
    {DType::kF8E8M0, 1, 0xfe, ""},
};

// One number among 5 x 31, so that the last block is not full.
TEST(Finite, FindsOneNumberAnywhere) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kColumns = 31;
  for (const Pattern& pattern : kPatterns) {
    for (const int64_t index : {int64_t{0}, int64_t{63}, int64_t{64}, kRows * kColumns - 1}) {
      std::vector<std::byte> data(static_cast<size_t>(kRows * kColumns) * pattern.bytes);
      std::memcpy(data.data() + static_cast<size_t>(index) * pattern.bytes, &pattern.bits,
                  pattern.bytes);
      TensorInfo tensor;
      tensor.dtype = pattern.dtype;
      tensor.shape = {kRows, kColumns};
      tensor.data = data;
      EXPECT_EQ(all_finite(pattern.dtype, data), pattern.text.empty());
      const std::string text = describe_not_finite(tensor);
      const std::string expected = pattern.text.empty()
                                       ? ""
                                       : fmt::format("element [{}, {}] is {}", index / kColumns,
                                                     index % kColumns, pattern.text);
      EXPECT_EQ(text, expected);
    }
  }
}

}  // namespace
}  // namespace nibble
