#include "bench/cuda/schedules/nibbles.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace nibble::cuda {
namespace {

struct Chunk {
  uint32_t words[4];
};

TEST(Nibbles, EightCodesComeBackInTheirOrderTimes16) {
  std::mt19937 random(1);
  for (int run = 0; run < 10000; ++run) {
    int8_t codes[8], bytes[8];
    for (int8_t& code : codes) {
      code = static_cast<int8_t>(static_cast<int>(random() % 16) - 8);
    }
    uint32_t eight[2];
    std::memcpy(eight, codes, sizeof(eight));
    const uint32_t word = join_nibbles(eight[0], eight[1]);
    const uint32_t unpacked[2] = {first_of_nibbles(word), second_of_nibbles(word)};
    std::memcpy(bytes, unpacked, sizeof(bytes));
    for (int i = 0; i < 8; ++i) {
      ASSERT_EQ(int{bytes[i]}, 16 * codes[i]) << i;
    }
  }
}

/// A tile's shared memory while threads unpack it as unpack_tile() does.
template <int kTokens, int kThreads>
class Emulation {
 public:
  using At = NibbleTile<kTokens>;

  explicit Emulation(const std::vector<int8_t>& codes) {
    for (int token = 0; token < kTokens; ++token) {  // as the copy engine leaves rows of 64 bytes
      for (int i = 0; i < 128; i += 8) {
        uint32_t eight[2];
        std::memcpy(eight, codes.data() + 128 * token + i, sizeof(eight));
        const uint32_t word = join_nibbles(eight[0], eight[1]);
        std::memcpy(memory_.data() + At::kCopied + 64 * token + i / 2, &word, sizeof(word));
      }
    }
  }

  /// Threads in the order of `order`, each up to the barrier; then in it again, to the end.
  void unpack(const std::vector<int>& order) {
    const int free = At::free_turns(kThreads);
    for (const int thread : order) {
      for (int turn = 0; turn < free; ++turn) {
        load(thread, turn);
      }
      for (int turn = 0; turn < free; ++turn) {
        store(thread, turn);
      }
      for (int turn = free; turn < At::turns(kThreads); ++turn) {
        load(thread, turn);
      }
    }
    for (const int thread : order) {
      for (int turn = free; turn < At::turns(kThreads); ++turn) {
        store(thread, turn);
      }
    }
  }

  [[nodiscard]] int byte(size_t at) const { return static_cast<int8_t>(memory_[at]); }
  [[nodiscard]] int written(size_t at) const { return written_[at]; }

 private:
  static bool mine(int thread, int turn) { return thread + turn * kThreads < At::kChunks; }
  Chunk& held(int thread, int turn) {
    return held_[static_cast<size_t>(thread)][static_cast<size_t>(turn)];
  }
  void load(int thread, int turn) {
    if (mine(thread, turn)) {
      const size_t from = At::copied(thread) + static_cast<size_t>(turn) * kThreads * 16;
      std::memcpy(&held(thread, turn), memory_.data() + from, sizeof(Chunk));
    }
  }
  void store(int thread, int turn) {
    if (!mine(thread, turn)) {
      return;
    }
    const uint32_t* words = held(thread, turn).words;
    for (int half = 0; half < 2; ++half) {
      const uint32_t four[4] = {
          first_of_nibbles(words[2 * half]), second_of_nibbles(words[2 * half]),
          first_of_nibbles(words[2 * half + 1]), second_of_nibbles(words[2 * half + 1])};
      const size_t to = At::unpacked(thread, half) + static_cast<size_t>(turn) * kThreads * 32;
      std::memcpy(memory_.data() + to, four, sizeof(four));
      for (size_t i = 0; i < sizeof(four); ++i) {
        ++written_[to + i];
      }
    }
  }

  std::vector<uint8_t> memory_ = std::vector<uint8_t>(size_t{128} * kTokens, 0xaa);
  std::vector<int> written_ = std::vector<int>(size_t{128} * kTokens, 0);
  std::array<std::array<Chunk, At::turns(kThreads)>, kThreads> held_{};
};

template <int kTokens, int kThreads>
void check_tile() {
  static_assert(kThreads % NibbleTile<kTokens>::kEvery == 0);
  std::mt19937 random(kTokens);
  std::vector<int8_t> codes(size_t{128} * kTokens);
  for (int8_t& code : codes) {
    code = static_cast<int8_t>(static_cast<int>(random() % 15) - 7);
  }
  std::vector<int> order(kThreads);
  std::iota(order.begin(), order.end(), 0);
  for (int run = 0; run < 8; ++run) {
    Emulation<kTokens, kThreads> emulation(codes);
    emulation.unpack(order);
    for (size_t i = 0; i < codes.size(); ++i) {
      const size_t token = i / 128, column = i % 128;
      const size_t at = 128 * token + 16 * (column / 16 ^ token % 8) + column % 16;
      ASSERT_EQ(emulation.byte(at), 16 * codes[i]) << token << ", " << column;
      ASSERT_EQ(emulation.written(at), 1) << at;
    }
    if (run == 0) {
      std::reverse(order.begin(), order.end());
    } else {
      std::shuffle(order.begin(), order.end(), random);
    }
  }
}

TEST(Nibbles, ATileIsUnpackedWhereItLiesInAnyOrderOfThreads) {
  check_tile<16, 32>();
  check_tile<64, 96>();
  check_tile<128, 96>();
  check_tile<128, 128>();
}

}  // namespace
}  // namespace nibble::cuda
