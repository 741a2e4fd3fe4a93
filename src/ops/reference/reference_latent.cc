#include <cmath>
#include <vector>

#include "ops/latent.h"
#include "ops/reference/latent_rows.h"

namespace nibble {
namespace {

void normalize(float* x, int64_t count, const float* weight, float eps) {
  double squares = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    squares += static_cast<double>(x[i]) * x[i];
  }
  const double factor = 1.0 / std::sqrt(squares / static_cast<double>(count) + eps);
  for (int64_t i = 0; i < count; ++i) {
    x[i] = static_cast<float>(x[i] * factor * weight[i]);
  }
}

std::vector<float> rotated(const float* x, int64_t position, const LatentRope& rope) {
  const int64_t half = rope.dim / 2;
  std::vector<float> out(static_cast<size_t>(rope.dim));
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * rope.inv_freq[i];
    const double cosine = std::cos(angle) * rope.attention_factor;
    const double sine = std::sin(angle) * rope.attention_factor;
    const double a = rope.interleaved ? x[2 * i] : x[i];
    const double b = rope.interleaved ? x[2 * i + 1] : x[i + half];
    out[static_cast<size_t>(i)] = static_cast<float>(a * cosine - b * sine);
    out[static_cast<size_t>(i + half)] = static_cast<float>(b * cosine + a * sine);
  }
  return out;
}

}  // namespace

void reference_latent_append(const LatentAppendArgs& args) {
  const int64_t rank = args.kv.latent_rank;
  for (const SequenceSpan& sequence : args.sequences) {
    for (int64_t i = 0; i < sequence.q_len; ++i) {
      const int64_t position = sequence.kv_len - sequence.q_len + i;
      float* row = args.rows.f32() + (sequence.q_begin + i) * args.stride;
      if (args.q_norm != nullptr) {
        normalize(row, args.q_rank, args.q_norm, args.norm_eps);
      }
      std::vector<float> cached(row + args.q_rank, row + args.q_rank + rank);
      normalize(cached.data(), rank, args.latent_norm, args.norm_eps);
      const std::vector<float> key = rotated(row + args.q_rank + rank, position, args.rope);
      cached.insert(cached.end(), key.begin(), key.end());
      reference::write_latent(args.kv,
                              args.kv.keys(sequence.pages[position / args.kv.page_size], 0),
                              position % args.kv.page_size, cached.data());
    }
  }
}

void reference_latent_queries(const LatentQueryArgs& args) {
  for (const SequenceSpan& sequence : args.sequences) {
    for (int64_t i = 0; i < sequence.q_len * args.heads; ++i) {
      const int64_t token = i / args.heads;
      const int64_t row = sequence.q_begin + token;
      const float* q = args.q.f32() + row * args.q_stride + i % args.heads * args.head_dim;
      const std::vector<float> turned = rotated(
          q + args.head_dim - args.rope.dim, sequence.kv_len - sequence.q_len + token, args.rope);
      float* out = args.out.f32() + (row * args.heads + i % args.heads + 1) * args.out_dim;
      std::copy(turned.begin(), turned.end(), out - args.rope.dim);
    }
  }
}

}  // namespace nibble
