// Bytes for the GPU beside what each matrix says of itself. Needs no GPU.

#include "backend/cuda/weight_stream.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/scheme.h"

namespace nibble::cuda {
namespace {

QuantTensor random_tensor(const WeightFormat& format, int64_t n, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  QuantTensor tensor = QuantTensor::allocate(format, n, k).value();
  for (std::byte& byte : tensor.codes.as<std::byte>()) {
    byte = static_cast<std::byte>(random());
  }
  for (Buffer* numbers : {&tensor.scales, &tensor.minimums}) {
    for (float& number : numbers->as<float>()) {
      number = static_cast<float>(random() % 1000);
    }
  }
  for (int8_t& zero : tensor.zeros.as<int8_t>()) {
    zero = static_cast<int8_t>(random() % 16 - 8);
  }
  return tensor;
}

/// All bytes, written in pieces of `piece`.
std::vector<std::byte> written(const WeightStream& stream, size_t piece) {
  std::vector<std::byte> out(stream.bytes());
  for (size_t begin = 0; begin < out.size(); begin += piece) {
    stream.write(begin, std::min(piece, out.size() - begin), out.data() + begin);
  }
  return out;
}

TEST(WeightStream, HasTheCodesOfMatricesOneAfterTheOther) {
  const WeightFormat format = find_scheme("mxfp4").value().weight;
  const QuantTensor both = random_tensor(format, 10, 96, 1);
  QuantView even = view_of(both);  // as gpt-oss stores gate and up
  even.n = 5;
  even.row_stride = 2 * even.row_bytes();
  QuantView odd = even;
  odd.codes += even.row_bytes();
  WeightStream stream;
  stream.add(even, WeightField::kCodes);
  stream.align(256);
  const size_t second = stream.bytes();
  EXPECT_EQ(second, 256U);
  stream.add(odd, WeightField::kCodes);
  for (const size_t piece : {4, 100, 1000}) {
    const std::vector<std::byte> out = written(stream, piece);
    for (int64_t row = 0; row < 5; ++row) {
      const auto bytes = static_cast<size_t>(even.row_bytes());
      const size_t at = static_cast<size_t>(row) * bytes;
      EXPECT_EQ(std::memcmp(out.data() + at, even.code_row(row), bytes), 0) << piece;
      EXPECT_EQ(std::memcmp(out.data() + second + at, odd.code_row(row), bytes), 0) << piece;
    }
  }
}

// Pieces that lie anywhere, of other nibbles and of BF16 scales, by way of the copy that was given.
TEST(WeightStream, CopiesAsItWasToldTo) {
  static size_t copied = 0;
  copied = 0;
  const QuantTensor tensor = random_tensor(find_scheme("w4a16_g32").value().weight, 40, 2048, 5);
  const std::vector<uint16_t> scales = [&] {
    std::vector<uint16_t> halves;
    for (const float scale : tensor.scales.as<float>()) {
      halves.push_back(f32_to_bf16(scale));
    }
    return halves;
  }();
  QuantView view = view_of(tensor);
  view.nibbles = {.reordered = true, .signed_code = true};
  view.scales = reinterpret_cast<const std::byte*>(scales.data());
  view.scale_type = DType::kBF16;
  WeightStream stream([](const std::byte* from, size_t count, std::byte* to) {
    copied += count;
    std::memcpy(to, from, count);
  });
  stream.add(view, WeightField::kCodes);
  const size_t codes = stream.bytes();
  stream.add(view, WeightField::kScales);
  std::vector<std::byte> want(stream.bytes());
  view.copy_codes(0, static_cast<int64_t>(codes), want.data());
  for (size_t i = 0; i < scales.size(); ++i) {
    const float scale = bf16_to_f32(scales[i]);
    std::memcpy(want.data() + codes + 4 * i, &scale, 4);
  }
  for (const size_t piece : {size_t{100}, size_t{4096}, want.size()}) {
    copied = 0;
    EXPECT_EQ(written(stream, piece), want) << piece;
    EXPECT_EQ(copied, codes + 2 * scales.size()) << piece;
  }
}

TEST(WeightStream, WidensNumbers) {
  for (const char* name : {"w4a16_g32", "w4a16_g32_asym"}) {
    const WeightFormat format = find_scheme(name).value().weight;
    const QuantTensor tensor = random_tensor(format, 7, 128, 2);
    const QuantView view = view_of(tensor);
    const bool zeros = format.zero_points == ZeroPoints::kPerScale;
    WeightStream stream;
    stream.add(view, WeightField::kScales);
    if (zeros) {
      stream.add(view, WeightField::kZeros);
    }
    const size_t count = tensor.scales.as<float>().size();
    ASSERT_EQ(stream.bytes(), count * sizeof(float) * (zeros ? 2 : 1));
    for (const size_t piece : {4, 60, 1000}) {
      const std::vector<std::byte> out = written(stream, piece);
      std::vector<float> numbers(out.size() / sizeof(float));
      std::memcpy(numbers.data(), out.data(), out.size());
      EXPECT_TRUE(std::equal(numbers.begin(), numbers.begin() + static_cast<int64_t>(count),
                             tensor.scales.as<float>().begin()));
      EXPECT_TRUE(std::equal(numbers.begin() + static_cast<int64_t>(count), numbers.end(),
                             tensor.zeros.as<int8_t>().begin()));
    }
  }
}

TEST(WeightStream, RoundsToBf16) {
  const WeightFormat format{WeightCode::kF32, ScalePer::kNone, 0, DType::kF32};
  QuantTensor tensor = QuantTensor::allocate(format, 3, 6).value();
  for (float value = 0.1F; float& weight : tensor.codes.as<float>()) {
    weight = value *= -1.7F;
  }
  const QuantView view = view_of(tensor);
  WeightStream stream;
  stream.add(view, WeightField::kCodes);
  stream.add(view, WeightField::kScales);
  ASSERT_EQ(stream.bytes(), size_t{3 * 6 * 2});
  const std::vector<std::byte> out = written(stream, 8);
  for (size_t i = 0; i < 18; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, out.data() + 2 * i, 2);
    EXPECT_EQ(bits, f32_to_bf16(tensor.codes.as<float>()[i]));
  }
}

}  // namespace
}  // namespace nibble::cuda
