// Where codecs put the codes of weights; on the host, without a GPU.

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cuda/kernels/gemm_sm80/codecs.cuh"

namespace nibble::cuda::sm80 {
namespace {

constexpr int kWarpRows = 32;
constexpr int kLanes = 32;

/// Every code of a warp's 32 rows and 64 of k is in one element of one word.
template <typename Codec>
void check_places(const char* name) {
  std::vector<int> places(kWarpRows * kStep);
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int chunk = 0; chunk < Codec::kChunks; ++chunk) {
      for (int word = 0; word < 4; ++word) {
        for (int element = 0; element < 32 / Codec::kCodeBits; ++element) {
          const Source source = Codec::source(lane, chunk, word, element);
          ASSERT_TRUE(source.row >= 0 && source.row < kWarpRows) << name;
          ASSERT_TRUE(source.column >= 0 && source.column < kStep) << name;
          ++places[static_cast<size_t>(source.row * kStep + source.column)];
        }
      }
    }
  }
  EXPECT_EQ(places, std::vector<int>(kWarpRows * kStep, 1)) << name;
}

TEST(GemmSm80Codecs, EveryCodeHasOnePlace) {
  check_places<CodecBf16>("bf16");
  check_places<CodecFp8>("fp8");
  check_places<CodecFp8Groups>("fp8 in groups");
  check_places<CodecW8A8>("int8");
  check_places<CodecW8A16<ScalePer::kChannel>>("int8 with bf16");
  check_places<CodecW4A8>("int4 with int8");
  check_places<CodecW4A16<32>>("int4 with bf16");
  check_places<CodecW4A16Channel>("int4 with bf16, a scale per channel");
  check_places<CodecFp4A16>("fp4 with bf16");
}

/// Which element of k lane (g, t) has in byte j of word i of an operand of mma.m16n8k32.
int operand_k(int t, int i, int j) { return 4 * t + 16 * i + j; }

// Both products of a step by the fragments of PTX, on codes and activations of a byte, the latter
// in the order of mma.cuh: lane (g, t) has bytes 16 t to 16 t + 15 of token g.
TEST(GemmSm80Codecs, BytesMeetTheirActivations) {
  constexpr int kTokens = 8;
  const auto weight = [](int row, int column) { return row * 7 + column * 5 % 13 + 1; };
  const auto activation = [](int token, int column) { return token * 3 + column * 11 % 17 + 1; };
  for (int half = 0; half < 2; ++half) {
    std::vector<int> sums(16 * kTokens);
    for (int s = 0; s < 2; ++s) {
      std::vector<int> a(16 * 32), b(32 * kTokens);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int g = lane / 4;
        const int t = lane % 4;
        for (int j = 0; j < 4; ++j) {
          for (int i = 0; i < 4; ++i) {
            const Source source = CodecFp8::source(lane, half * 2 + s, i, j);
            a[static_cast<size_t>((g + 8 * (i & 1)) * 32 + operand_k(t, i >> 1, j))] =
                weight(source.row, source.column);
          }
          for (int i = 0; i < 2; ++i) {
            b[static_cast<size_t>(operand_k(t, i, j) * kTokens + g)] =
                activation(g, 16 * t + 8 * s + 4 * i + j);
          }
        }
      }
      for (int at = 0; at < 16 * kTokens; ++at) {
        for (int k = 0; k < 32; ++k) {
          sums[static_cast<size_t>(at)] += a[static_cast<size_t>(at / kTokens * 32 + k)] *
                                           b[static_cast<size_t>(k * kTokens + at % kTokens)];
        }
      }
    }
    for (int at = 0; at < 16 * kTokens; ++at) {
      int expected = 0;
      for (int k = 0; k < kStep; ++k) {
        expected += weight(half * 16 + at / kTokens, k) * activation(at % kTokens, k);
      }
      EXPECT_EQ(sums[static_cast<size_t>(at)], expected) << "half " << half << " at " << at;
    }
  }
}

}  // namespace
}  // namespace nibble::cuda::sm80
