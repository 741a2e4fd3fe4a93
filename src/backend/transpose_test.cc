#include "backend/cpu/transpose.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace nibble::cpu {
namespace {

/// Byte `b` of word `word` of row `lane`, as the comments of RowsToTranspose say.
uint8_t expected_byte(const RowsToTranspose& source, int64_t lane, int64_t word, int64_t b) {
  const auto mask = [b](uint32_t bits) { return static_cast<uint8_t>(bits >> (8 * b)); };
  const uint8_t* row = source.rows[static_cast<size_t>(lane)];
  const int64_t at = word * 4 + b;
  if (row == nullptr || at >= source.bytes) {
    return mask(source.fill);
  }
  const uint8_t kept = word == (source.bytes - 1) / 4 ? mask(source.last_word) : 0xff;
  return static_cast<uint8_t>((row[at] & kept) | (mask(source.fill) & ~kept));
}

/// Where that byte goes.
int64_t place_of(WordOrder order, int64_t lane, int64_t word, int64_t b) {
  switch (order) {
    case WordOrder::kHalves:
      return word * 64 + b / 2 * 32 + lane * 2 + b % 2;
    case WordOrder::kBytes:
      return word * 64 + b * 16 + lane;
    default:
      return word * 64 + lane * 4 + b;
  }
}

uint32_t nibble_at(uint32_t word, int i) { return word >> (4 * i) & 0xfU; }

TEST(Transpose, PutsEveryByteInItsPlace) {
  std::mt19937 random(7);
  for (const int64_t bytes : {1, 4, 6, 63, 64, 68, 128, 200}) {
    std::vector<uint8_t> memory(static_cast<size_t>(kTileRows * bytes) + 1);
    for (uint8_t& byte : memory) {
      byte = static_cast<uint8_t>(random());
    }
    for (const int64_t rows : {int64_t{1}, int64_t{5}, kTileRows}) {
      for (const int64_t more : {0, 1, 7}) {
        RowsToTranspose source{.bytes = bytes, .last_word = more == 1 ? 0xfffU : ~0U};
        source.fill = 0x88888888U;
        for (int64_t lane = 0; lane < rows; ++lane) {  // rows at odd addresses
          source.rows[static_cast<size_t>(lane)] = memory.data() + 1 + lane * bytes;
        }
        const int64_t words = (bytes + 3) / 4 + more;
        for (const WordOrder order : {WordOrder::kWords, WordOrder::kHalves, WordOrder::kBytes}) {
          std::vector<uint8_t> out(static_cast<size_t>(words * 64) + 1, 0x5a);
          transpose_rows(source, words, order, out.data());
          EXPECT_EQ(out.back(), 0x5a);
          for (int64_t word = 0; word < words; ++word) {
            for (int64_t lane = 0; lane < kTileRows; ++lane) {
              for (int64_t b = 0; b < 4; ++b) {
                ASSERT_EQ(out[static_cast<size_t>(place_of(order, lane, word, b))],
                          expected_byte(source, lane, word, b))
                    << bytes << " bytes, word " << word << ", lane " << lane;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Transpose, ShufflesNibbles) {
  uint32_t words[kTileRows];
  RowsToTranspose source{.bytes = 4};
  for (uint32_t i = 0; i < kTileRows; ++i) {
    words[i] = 0x76543210U + i * 0x9e3779b9U;
    source.rows[i] = reinterpret_cast<const uint8_t*>(&words[i]);
  }
  const auto check = [&](WordOrder order, const int(&nibbles)[8]) {
    uint32_t out[kTileRows];
    transpose_rows(source, 1, order, reinterpret_cast<uint8_t*>(out));
    for (size_t lane = 0; lane < kTileRows; ++lane) {
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(nibble_at(out[lane], i), nibble_at(words[lane], nibbles[i]));
      }
    }
  };
  check(WordOrder::kNibbles, {0, 4, 1, 5, 2, 6, 3, 7});
  check(WordOrder::kEvenOdd, {0, 2, 4, 6, 1, 3, 5, 7});
  source.flip = 0x12345678U;
  uint32_t out[2 * kTileRows];  // the second word is past the rows' end
  transpose_rows(source, 2, WordOrder::kWords, reinterpret_cast<uint8_t*>(out));
  for (size_t lane = 0; lane < kTileRows; ++lane) {
    EXPECT_EQ(out[lane], words[lane] ^ source.flip);
    EXPECT_EQ(out[kTileRows + lane], source.fill ^ source.flip);
  }
}

}  // namespace
}  // namespace nibble::cpu
