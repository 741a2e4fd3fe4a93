#include "backend/cpu/cpu_latent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cpu/attention_task.h"
#include "backend/cpu/kv_rows.h"
#include "backend/cpu/kv_writer.h"
#include "backend/cpu/numbers.h"
#include "base/check.h"

namespace nibble::cpu {
namespace {

/// Cosines and sines of a position [dim / 2] each.
struct Angles {
  float cosine[kMaxHeadDim / 2];
  float sine[kMaxHeadDim / 2];

  Angles(const LatentRope& rope, int64_t position) {
    for (int64_t i = 0; i < rope.dim / 2; ++i) {
      const double angle = static_cast<double>(position) * rope.inv_freq[i];
      cosine[i] = static_cast<float>(std::cos(angle) * rope.attention_factor);
      sine[i] = static_cast<float>(std::sin(angle) * rope.attention_factor);
    }
  }
};

/// x [dim] rotated, its pairs in halves.
void rotate_to_halves(const KernelTable& kernels,
                      const LatentRope& rope,
                      const Angles& angles,
                      float* x) {
  if (rope.interleaved) {
    float halves[kMaxHeadDim];
    for (int64_t i = 0; i < rope.dim / 2; ++i) {
      halves[i] = x[2 * i];
      halves[i + rope.dim / 2] = x[2 * i + 1];
    }
    std::copy(halves, halves + rope.dim, x);
  }
  kernels.rotate(x, rope.dim, angles.cosine, angles.sine);
}

/// A row of the step and where it belongs.
struct TokenPlace {
  const SequenceSpan* sequence = nullptr;
  int64_t row = 0;
  int64_t position = 0;
};

std::vector<TokenPlace> places_of(std::span<const SequenceSpan> sequences) {
  std::vector<TokenPlace> places;
  for (const SequenceSpan& sequence : sequences) {
    for (int64_t i = 0; i < sequence.q_len; ++i) {
      places.push_back({&sequence, sequence.q_begin + i, sequence.kv_len - sequence.q_len + i});
    }
  }
  return places;
}

/// A part of a row in F32, normed where `norm` is.
void load_normed(const KernelTable& kernels,
                 const ConstActivations& from,
                 int64_t count,
                 const float* norm,
                 float eps,
                 float* to) {
  kernels.load(numbers_of(from), count, to);
  if (norm != nullptr) {
    kernels.rms_norm(to, count, norm, eps, to);
  }
}

}  // namespace

void append_latent(const KernelTable& kernels, Workspace& workspace, const LatentAppendArgs& args) {
  const KvWriter writer(kernels, args.kv, layout_of(args.kv));
  const int64_t rank = args.kv.latent_rank;
  const std::vector<TokenPlace> places = places_of(args.sequences);
  CHECK(args.kv.latent());
  CHECK_EQ(args.kv.rope_dim(), args.rope.dim);
  workspace.pool().parallel_for(std::ssize(places), [&](int64_t index, int thread) {
    const TokenPlace& place = places[static_cast<size_t>(index)];
    const Activations row = args.rows.at(place.row * args.stride);
    if (args.q_norm != nullptr) {
      float* query = workspace.row(thread);
      load_normed(kernels, row, args.q_rank, args.q_norm, args.norm_eps, query);
      kernels.store(query, args.q_rank, numbers_of(row));
    }
    float cached[kMaxHeadDim];
    load_normed(kernels, row.at(args.q_rank), rank, args.latent_norm, args.norm_eps, cached);
    load_normed(kernels, row.at(args.q_rank + rank), args.rope.dim, nullptr, 0.0F, cached + rank);
    rotate_to_halves(kernels, args.rope, Angles(args.rope, place.position), cached + rank);
    writer.write_latent({.page = place.sequence->pages[place.position / args.kv.page_size],
                         .slot = place.position % args.kv.page_size},
                        cached);
  });
}

void rotate_latent_queries(const KernelTable& kernels,
                           Workspace& workspace,
                           const LatentQueryArgs& args) {
  const std::vector<TokenPlace> places = places_of(args.sequences);
  workspace.pool().parallel_for(std::ssize(places), [&](int64_t index, int) {
    const TokenPlace& place = places[static_cast<size_t>(index)];
    const Angles angles(args.rope, place.position);
    float values[kMaxHeadDim];
    for (int64_t head = 0; head < args.heads; ++head) {
      const int64_t from = place.row * args.q_stride + (head + 1) * args.head_dim - args.rope.dim;
      const int64_t to = (place.row * args.heads + head + 1) * args.out_dim - args.rope.dim;
      load_normed(kernels, args.q.at(from), args.rope.dim, nullptr, 0.0F, values);
      rotate_to_halves(kernels, args.rope, angles, values);
      kernels.store(values, args.rope.dim, numbers_of(args.out.at(to)));
    }
  });
}

}  // namespace nibble::cpu
