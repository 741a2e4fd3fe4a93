#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace nibble {

inline constexpr int kMaxTopLogprobs = 20;

/// How one row's token is sampled on a device: the fields of SamplingParams and SamplerInput
/// (ops/sampler.h) that matter there.
struct RowSampling {
  uint64_t seed = 0;
  int64_t step = 0;  // tokens generated before
  double top_p = 1.0;
  float inverse_temperature = 0.0F;  // float(1 / max(temperature, 1e-6)); 0: greedy
  float min_p = 0.0F;
  int32_t top_k = 0;      // 0: off
  int32_t logprobs = -1;  // -1: none; 0..kMaxTopLogprobs: that many alternatives
};

/// The number in [0, 1) that a token is drawn by. A counter run through a mixer twice: a stateless
/// generator, so a preempted or re-batched sequence draws the same numbers, on every device.
constexpr double draw_uniform(uint64_t seed, int64_t step) {
  uint64_t x = seed;
  const uint64_t words[2] = {static_cast<uint64_t>(step), 0x5851f42d4c957f2dULL};
  for (const uint64_t word : words) {
    x += word * 0x9e3779b97f4a7c15ULL + 0x632be59bd9b4e019ULL;
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1.0p-53;
}

/// A change of one logit before the sample: + bias; then / repetition where that is positive, or *
/// repetition; then - penalty. A bias of -infinity bans the token.
struct LogitEdit {
  int32_t row = 0;
  int32_t token = 0;
  float bias = 0.0F;
  float repetition = 1.0F;
  float penalty = 0.0F;
};

enum class SampleStatus : int32_t {
  kOk,
  kNotFinite,  // the logits have a NaN or an infinity
  kNoneLeft,   // all tokens are banned
};

struct TopLogprob {
  int32_t token = 0;  // -1 where the vocabulary has fewer
  float logprob = 0.0F;
};

/// What a step's tokens are sampled by: one entry for each row of logits, and at most
/// kMaxLogitEdits edits, no two for the same row and token.
struct SamplingInput {
  std::span<const RowSampling> rows;
  std::span<const LogitEdit> edits;
  /// Either none, or for each row which of `masks` says what may be sampled (-1: all may).
  std::span<const int32_t> mask_of = {};
  std::span<const uint32_t> masks = {};  // [n, mask_words(vocab_size)], of ops/token_mask.h
};
inline constexpr int64_t kMaxLogitEdits = int64_t{1} << 16;

struct SampledRow {
  int32_t token = -1;
  SampleStatus status = SampleStatus::kOk;
  float logprob = 0.0F;  // with top: of rows with logprobs >= 0
  std::array<TopLogprob, kMaxTopLogprobs> top = {};
};

}  // namespace nibble
