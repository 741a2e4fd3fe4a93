#include "backend/cpu/transpose.h"

#include <algorithm>
#include <cstring>

namespace nibble::cpu {
namespace {

using Words = uint32_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(16)));
using Bytes = uint8_t __attribute__((vector_size(16)));

constexpr int64_t kBlockWords = 16;  // of each row: one cache line
constexpr int64_t kBlockBytes = kBlockWords * 4;
constexpr int64_t kOutBytes = kTileRows * 4;  // of the words at one place

Words load(const uint8_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <typename Vector>
void store(const Vector& x, uint8_t* to) {
  std::memcpy(to, &x, sizeof x);
}

// Rows a to d of four words become columns.
void transpose_4x4(Words (&x)[4]) {
  const Words ab_low = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  const Words ab_high = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const Words cd_low = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const Words cd_high = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

// Swaps the middle bytes of each word.
Words swap_bytes(Words x) {
  const Words change = (x ^ (x >> 8)) & 0x0000ff00U;
  return x ^ change ^ (change << 8);
}

// Swaps the middle nibbles of each half.
Words swap_nibbles(Words x) {
  const Words change = (x ^ (x >> 4)) & 0x00f000f0U;
  return x ^ change ^ (change << 4);
}

template <WordOrder kOrder>
Words shuffle_nibbles(Words x) {
  if constexpr (kOrder == WordOrder::kNibbles) {
    return swap_nibbles(swap_bytes(x));
  } else if constexpr (kOrder == WordOrder::kEvenOdd) {
    return swap_bytes(swap_nibbles(x));
  } else {
    return x;
  }
}

// The lower half of every word.
Halves low_halves(const Words& a, const Words& b) {
  return __builtin_shufflevector(reinterpret_cast<Halves>(a), reinterpret_cast<Halves>(b), 0, 2, 4,
                                 6, 8, 10, 12, 14);
}

Halves high_halves(const Words& a, const Words& b) { return low_halves(a >> 16, b >> 16); }

Bytes low_bytes(const Halves& a, const Halves& b) {
  return __builtin_shufflevector(reinterpret_cast<Bytes>(a), reinterpret_cast<Bytes>(b), 0, 2, 4, 6,
                                 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

Bytes high_bytes(const Halves& a, const Halves& b) { return low_bytes(a >> 8, b >> 8); }

// The 16 words of one place in their final order.
template <WordOrder kOrder>
void finish(const Words (&x)[4], uint32_t flip, uint8_t* out) {
  if constexpr (kOrder == WordOrder::kHalves) {
    store(low_halves(x[0], x[1]), out);
    store(low_halves(x[2], x[3]), out + 16);
    store(high_halves(x[0], x[1]), out + 32);
    store(high_halves(x[2], x[3]), out + 48);
  } else if constexpr (kOrder == WordOrder::kBytes) {
    const Halves low[2] = {low_halves(x[0], x[1]), low_halves(x[2], x[3])};
    const Halves high[2] = {high_halves(x[0], x[1]), high_halves(x[2], x[3])};
    store(low_bytes(low[0], low[1]), out);
    store(high_bytes(low[0], low[1]), out + 16);
    store(low_bytes(high[0], high[1]), out + 32);
    store(high_bytes(high[0], high[1]), out + 48);
  } else {
    for (int part = 0; part < 4; ++part) {
      store(shuffle_nibbles<kOrder>(x[part]) ^ flip, out + part * 16);
    }
  }
}

// Four words of 16 rows.
template <WordOrder kOrder>
void transpose_quarter(const TileRows& rows, int64_t offset, uint32_t flip, uint8_t* out) {
  Words x[4][4];
  for (size_t part = 0; part < 4; ++part) {
    for (size_t row = 0; row < 4; ++row) {
      x[part][row] = load(rows[part * 4 + row] + offset);
    }
    transpose_4x4(x[part]);
  }
  for (int word = 0; word < 4; ++word) {
    finish<kOrder>({x[0][word], x[1][word], x[2][word], x[3][word]}, flip, out + word * kOutBytes);
  }
}

// A block of 16 words of each row, cut out and filled up where rows end or are missing.
class FilledBlock {
 public:
  FilledBlock(const RowsToTranspose& source, int64_t begin) {
    std::fill_n(&words_[0][0], kTileRows * kBlockWords, source.fill);
    const int64_t bytes = std::clamp<int64_t>(source.bytes - begin, 0, kBlockBytes);
    for (int64_t lane = 0; lane < kTileRows; ++lane) {
      if (source.rows[static_cast<size_t>(lane)] != nullptr) {
        std::memcpy(words_[lane], source.rows[static_cast<size_t>(lane)] + begin,
                    static_cast<size_t>(bytes));
        if (bytes > 0 && begin + bytes == source.bytes) {
          uint32_t& last = words_[lane][(bytes - 1) / 4];
          last = (last & source.last_word) | (source.fill & ~source.last_word);
        }
      }
      rows_[static_cast<size_t>(lane)] = reinterpret_cast<const uint8_t*>(words_[lane]);
    }
  }
  [[nodiscard]] const TileRows& rows() const { return rows_; }

 private:
  alignas(64) uint32_t words_[kTileRows][kBlockWords];
  TileRows rows_;
};

template <WordOrder kOrder>
void transpose(const RowsToTranspose& source, int64_t words, uint8_t* out) {
  const bool all_rows =
      std::find(source.rows.begin(), source.rows.end(), nullptr) == source.rows.end();
  // Blocks of whole words that all count.
  const int64_t whole =
      all_rows ? (source.bytes - (source.last_word == ~0U ? 0 : 1)) / kBlockBytes : 0;
  int64_t word = 0;
  for (; word + kBlockWords <= words && word < whole * kBlockWords; word += kBlockWords) {
    for (int64_t i = 0; i < kBlockWords; i += 4) {
      transpose_quarter<kOrder>(source.rows, (word + i) * 4, source.flip,
                                out + (word + i) * kOutBytes);
    }
  }
  while (word < words) {
    const FilledBlock block(source, word * 4);
    const int64_t end = std::min(words, word + kBlockWords);
    for (int64_t i = 0; word < end; i += 4) {
      alignas(64) uint8_t quarter[4 * kOutBytes];
      transpose_quarter<kOrder>(block.rows(), i * 4, source.flip, quarter);
      const int64_t count = std::min<int64_t>(4, end - word);
      std::memcpy(out + word * kOutBytes, quarter, static_cast<size_t>(count * kOutBytes));
      word += count;
    }
  }
}

}  // namespace

void transpose_rows(const RowsToTranspose& rows, int64_t words, WordOrder order, uint8_t* out) {
  switch (order) {
    case WordOrder::kWords:
      return transpose<WordOrder::kWords>(rows, words, out);
    case WordOrder::kHalves:
      return transpose<WordOrder::kHalves>(rows, words, out);
    case WordOrder::kBytes:
      return transpose<WordOrder::kBytes>(rows, words, out);
    case WordOrder::kNibbles:
      return transpose<WordOrder::kNibbles>(rows, words, out);
    case WordOrder::kEvenOdd:
      return transpose<WordOrder::kEvenOdd>(rows, words, out);
  }
}

}  // namespace nibble::cpu
