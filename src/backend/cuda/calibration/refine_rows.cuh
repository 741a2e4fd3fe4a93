#pragma once

#include <cstring>

#include "backend/cuda/calibration/column_rows.cuh"
#include "backend/cuda/calibration/refine_block.h"

namespace nibble::cuda {

NIBBLE_ROW float nearest_bf16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  bits += 0x7fffU + (bits >> 16U & 1U);
  bits &= 0xffff0000U;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

/// The loss changes by -2 slope d + curvature d^2 with a scale that is larger by d.
struct ScaleLoss {
  double slope = 0;
  double curvature = 0;

  /// The best that can be stored; `scale` itself where that is no better.
  [[nodiscard]] NIBBLE_ROW float better(float scale, StoredScale type) const {
    const auto wanted = static_cast<float>(scale + slope / curvature);
    const float stored = type == StoredScale::kBf16 ? nearest_bf16(wanted) : wanted;
    const double moved = static_cast<double>(stored) - scale;
    const float ratio = over(stored, scale);
    const bool near = ratio > 0.5F && ratio < 2.0F;
    const bool better = moved * (moved * curvature - 2 * slope) < 0;
    const bool finite = fabsf(stored * 128.0F) <= 0x1.fffffep127F;
    return near && better && finite ? stored : scale;
  }
};

/// Up to kColumnPart columns of a row, from `begin` on.
struct RowPart {
  int begin = 0;
  int64_t row = 0;
};

/// Stores what a part has become, and adds what the damping makes of its changes.
NIBBLE_ROW void store_part(const RefineBlockArgs& args,
                           const RowPart& part,
                           const float (&values)[kColumnPart],
                           const float (&changes)[kColumnPart]) {
  float gradients[kColumnPart];
  load_part({args.gradients + part.row, args.stride, part.begin, args.count}, 0.0F, gradients);
  NIBBLE_UNROLL
  for (int i = 0; i < kColumnPart; ++i) {
    if (part.begin + i < args.count) {
      const int64_t at = (part.begin + i) * args.stride + part.row;
      args.values[at] = values[i];
      args.changes[at] = changes[i];
      args.gradients[at] = fused(changes[i], args.damping, gradients[i]);
    }
  }
}

/// Every code of a row anew, given all others.
template <typename Codec>
struct RowSweep {
  const RefineBlockArgs& args;
  const float* square;    // of H: the block's, its upper triangle
  const float* inverses;  // [count]: 1 / (H + damping) of its diagonal
  Codec codec;

  NIBBLE_ROW void run(int64_t row) const {
    for (int begin = 0; begin < args.count; begin += kColumnPart) {
      sweep_part(begin, row);
    }
  }

  NIBBLE_ROW void sweep_part(int begin, int64_t row) const {
    constexpr float kMargin = 1 - 0x1p-18F;  // what is no nearer by this stays, for its rounding
    float sums[kColumnPart];
    float values[kColumnPart];
    float changes[kColumnPart] = {};
    load_part({args.gradients + row, args.stride, begin, args.count}, 0.0F, sums);
    load_part({args.values + row, args.stride, begin, args.count}, 0.0F, values);
    const int64_t group = (args.first + begin) / args.width * args.stride + row;
    const float scale = args.scales[group];
    const float inverse = over(1.0F, scale);
    const float zero = args.zeros == nullptr ? 0.0F : args.zeros[group];
    add_lines({args.changes + row, args.stride, 0, begin}, square, begin, sums);
    NIBBLE_UNROLL
    for (int i = 0; i < kColumnPart; ++i) {
      if (begin + i < args.count) {
        const float* line = square + (begin + i) * kSquarePitch + begin;
        const float before = values[i];
        const float step = times(sums[i], inverses[begin + i]);
        const float target = plus(before, step);
        const float best = codec.nearest(times(target, inverse), scale, zero);
        const bool nearer = fabsf(minus(target, best)) < times(kMargin, fabsf(step));
        values[i] = nearer ? best : before;
        changes[i] = minus(before, values[i]);
        NIBBLE_UNROLL
        for (int next = i + 1; next < kColumnPart; ++next) {
          sums[next] = fused(changes[i], line[next], sums[next]);
        }
      }
    }
    store_part(args, {begin, row}, values, changes);
  }
};

/// The scales of a row's groups, each given all codes and the scales in front of it: of groups that
/// lie in one block. `changes` hold a group's steps (codes less their zero points) until it is
/// done.
struct RowFit {
  const RefineBlockArgs& args;
  const float* square;  // as of RowSweep
  StoredScale type;

  NIBBLE_ROW void run(int64_t row) const {
    for (int begin = 0; begin < args.count; begin += args.width) {
      fit_group(begin, row);
    }
  }

  NIBBLE_ROW void fit_group(int begin, int64_t row) const {
    float* stored = args.scales + (args.first + begin) / args.width * args.stride + row;
    const float scale = *stored;
    ScaleLoss loss;
    for (int part = begin; part < begin + args.width; part += kColumnPart) {
      add_part({part, row}, {begin, scale}, loss);
    }
    const float fitted = loss.better(scale, type);
    *stored = fitted;
    for (int part = begin; part < begin + args.width; part += kColumnPart) {
      float values[kColumnPart];
      float changes[kColumnPart];  // first steps
      load_part({args.values + row, args.stride, part, args.count}, 0.0F, values);
      load_part({args.changes + row, args.stride, part, args.count}, 0.0F, changes);
      NIBBLE_UNROLL
      for (int i = 0; i < kColumnPart; ++i) {
        const float before = values[i];
        values[i] = fitted == scale ? before : times(changes[i], fitted);
        changes[i] = minus(before, values[i]);
      }
      store_part(args, {part, row}, values, changes);
    }
  }

  struct Group {
    int begin = 0;
    float scale = 0;
  };
  /// What a part of a group adds to its loss.
  NIBBLE_ROW void add_part(const RowPart& part, const Group& group, ScaleLoss& loss) const {
    const int begin = part.begin;
    float gradients[kColumnPart];
    float steps[kColumnPart];          // first values
    float products[kColumnPart] = {};  // of H and the steps of the group's earlier columns
    load_part({args.gradients + part.row, args.stride, begin, args.count}, 0.0F, gradients);
    load_part({args.values + part.row, args.stride, begin, args.count}, 0.0F, steps);
    add_lines({args.changes + part.row, args.stride, 0, group.begin}, square, begin, gradients);
    add_lines({args.changes + part.row, args.stride, group.begin, begin}, square, begin, products);
    NIBBLE_UNROLL
    for (int i = 0; i < kColumnPart; ++i) {
      const float* line = square + (begin + i) * kSquarePitch + begin;
      steps[i] = rintf(over(steps[i], group.scale));
      const double step = steps[i];
      const double own = static_cast<double>(plus(line[i], args.damping)) * step;
      loss.slope += step * gradients[i];
      loss.curvature += step * (own + 2.0 * products[i]);
      NIBBLE_UNROLL
      for (int next = i + 1; next < kColumnPart; ++next) {
        products[next] = fused(steps[i], line[next], products[next]);
      }
    }
    NIBBLE_UNROLL
    for (int i = 0; i < kColumnPart; ++i) {
      if (begin + i < args.count) {
        args.changes[(begin + i) * args.stride + part.row] = steps[i];
      }
    }
  }
};

}  // namespace nibble::cuda
