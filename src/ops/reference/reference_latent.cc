#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/f16.h"
#include "ops/latent.h"

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

void write_row(const KvView& kv, const SequenceSpan& sequence, int64_t position, const float* row) {
  std::byte* at = kv.keys(sequence.pages[position / kv.page_size], 0) +
                  position % kv.page_size * kv_row_bytes(kv.code, kv.head_dim);
  for (int64_t i = 0; i < kv.head_dim; ++i) {
    if (kv.code == KvCode::kF32) {
      reinterpret_cast<float*>(at)[i] = row[i];
    } else {
      CHECK(kv.code == KvCode::kBf16);
      reinterpret_cast<uint16_t*>(at)[i] = f32_to_bf16(row[i]);
    }
  }
}

}  // namespace

void reference_latent_append(const LatentAppendArgs& args) {
  const int64_t rank = args.kv.head_dim - args.rope.dim;
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
      write_row(args.kv, sequence, position, cached.data());
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
