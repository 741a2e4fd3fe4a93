#include "quantizer/encoder.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

std::vector<float> gaussian(size_t count) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

struct Encoded {
  std::vector<std::vector<std::byte>> slots;
  RowsError error;
};

Result<Encoded> encode(const MatrixEncoder& encoder,
                       const std::vector<float>& x,
                       int64_t n,
                       const Extent& extent = {}) {
  const auto k = static_cast<int64_t>(x.size()) / n;
  Encoded result;
  for (size_t slot = 0; slot < encoder.slots().size(); ++slot) {
    result.slots.emplace_back(static_cast<size_t>(encoder.place(slot, 0, n).bytes));
  }
  for (int64_t row = 0; row < n; row += encoder.row_block()) {
    const int64_t rows = std::min(encoder.row_block(), n - row);
    std::vector<std::byte*> out;
    for (size_t slot = 0; slot < result.slots.size(); ++slot) {
      out.push_back(result.slots[slot].data() + encoder.place(slot, row, rows).offset);
    }
    RowsError error;
    NIBBLE_RETURN_IF_ERROR(encoder.encode(row, rows, x.data() + row * k, extent, out, error));
    result.error.add(error);
  }
  return result;
}

TEST(Encoder, SlotsAreFilledExactly) {
  for (const QuantScheme& scheme : all_schemes()) {
    const auto made = make_encoder({.scheme = scheme}, 19, 256);
    if (!made.ok()) {
      continue;
    }
    const auto& encoder = *made;
    for (size_t slot = 0; slot < encoder->slots().size(); ++slot) {
      int64_t size = dtype_bits(encoder->slots()[slot].dtype) / 8;
      for (const int64_t extent : encoder->slots()[slot].shape) {
        size *= extent;
      }
      int64_t filled = 0;
      for (int64_t row = 0; row < 19; row += encoder->row_block()) {
        const auto place = encoder->place(slot, row, std::min(encoder->row_block(), 19 - row));
        EXPECT_EQ(place.bytes == 0 ? filled : place.offset, filled);
        filled += place.bytes;
      }
      EXPECT_EQ(filled, size) << scheme.name << " " << encoder->slots()[slot].suffix;
    }
  }
}

TEST(Encoder, NamesTheWeightThatIsNotFinite) {
  for (const QuantScheme& scheme : all_schemes()) {
    const auto made = make_encoder({.scheme = scheme}, 11, 128);
    if (!made.ok()) {
      continue;
    }
    const auto& encoder = *made;
    std::vector<float> x = gaussian(size_t{11} * 128);
    EXPECT_TRUE(encode(*encoder, x, 11).ok());
    x[9 * 128 + 77] = std::numeric_limits<float>::quiet_NaN();
    const auto result = encode(*encoder, x, 11);
    EXPECT_EQ(result.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(result.status().message().find("[9, 77]"), std::string::npos)
        << result.status().message();
  }
}

TEST(Encoder, MeasuresWhatWasLost) {
  const std::vector<float> x = gaussian(size_t{16} * 512);
  const auto encoder =
      make_encoder({.scheme = find_scheme("w4a16_g32").value(), .rule = ScaleRule::kAbsMax}, 16,
                   512)
          .value();
  const RowsError error = encode(*encoder, x, 16)->error;
  EXPECT_EQ(error.count, 16 * 512);
  EXPECT_NEAR(error.snr_db(), 20.25, 0.2);
  EXPECT_NEAR(error.cosine(), 0.9953, 0.0005);
}

TEST(Encoder, RefusesOddGroupsAndForeignDialects) {
  const QuantScheme scheme = find_scheme("w4a16_g32").value();
  EXPECT_EQ(make_encoder({.scheme = scheme}, 8, 100).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(make_encoder({.scheme = scheme, .dialect = Dialect::kFp8Block}, 8, 128).status().code(),
            StatusCode::kUnsupported);
}

}  // namespace
}  // namespace nibble
