#pragma once

// The step's queries and keys are rotated, and keys and values rounded to the cache's format: one
// warp per head of a row; optional RMS norm of each head of q and k before the rotation (Qwen3).
// Angles, cosines and sines are computed in double precision and rounded once, as on the CPU.

#include <type_traits>

#include "backend/cuda/attention.h"
#include "backend/cuda/kernels/attention/kv_forms.cuh"
#include "backend/range_report.h"

namespace nibble::cuda {

struct AppendArgs {
  uint16_t* qkv;  // null: nothing is appended
  int64_t stride;
  const int32_t* row_position;
  const int32_t* row_sequence;
  const int32_t* page_table;
  int64_t page_table_stride;
  uint8_t* pages;
  int64_t page_bytes;
  uint16_t* residual;  // ResidualKeys
  const int32_t* residual_table;
  int32_t page_size;
  int32_t heads;
  int32_t kv_heads;
  const float* inv_freq;
  int32_t inv_freq_stride;
  float attention_factor;
  const float* q_norm;
  const float* k_norm;
  float norm_eps;
  float k_factor;  // fp8: 1 / scale
  float v_factor;
  bool shared;  // AttentionForm::kShared
  KvBasis basis;
  uint32_t* far_outside;
};

[[nodiscard]] AppendArgs append_args(const RopeAppendLaunch& launch);

template <int kDim>
__device__ __forceinline__ HeadValues<kDim> load_head(const uint16_t* head, int lane) {
  using Values = HeadValues<kDim>;
  Values x = {};
  if (lane < Values::kLanes) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < Values::kEach; i += 2) {
        const uint32_t two = __ldcg(
            reinterpret_cast<const unsigned*>(head + half * (kDim / 2) + lane * Values::kEach + i));
        x.v[half][i] = __uint_as_float(two << 16);
        x.v[half][i + 1] = __uint_as_float(two & 0xffff0000U);
      }
    }
  }
  return x;
}

/// A head's means, or steps; zeros where there are none.
///   means  [kv_heads, kDim] f32, or null
template <int kDim>
__device__ __forceinline__ HeadValues<kDim> load_mean(const float* means, int kv_head, int lane) {
  using Values = HeadValues<kDim>;
  Values x = {};
  if (means != nullptr && lane < Values::kLanes) {
#pragma unroll
    for (int i = 0; i < 2 * Values::kEach; i += 2) {
      const int half = i / Values::kEach;
      const int d = half * (kDim / 2) + lane * Values::kEach + i % Values::kEach;
      const float2 two = __ldg(reinterpret_cast<const float2*>(means + kv_head * kDim + d));
      x.v[half][i % Values::kEach] = two.x;
      x.v[half][i % Values::kEach + 1] = two.y;
    }
  }
  return x;
}

template <int kDim>
__device__ __forceinline__ void subtract(HeadValues<kDim>& x, const HeadValues<kDim>& mean) {
  constexpr int kEach = HeadValues<kDim>::kEach;
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    x.v[i / kEach][i % kEach] -= mean.v[i / kEach][i % kEach];
  }
}

/// Multiplies a head by its channels' steps, or divides it by them; by those of 0 into 0.
///   steps  [kv_heads, kDim] f32, or null: nothing is done
template <int kDim>
__device__ __forceinline__ void multiply_by_steps(HeadValues<kDim>& x,
                                                  const float* steps,
                                                  int kv_head,
                                                  int lane) {
  constexpr int kEach = HeadValues<kDim>::kEach;
  if (steps != nullptr) {
    const HeadValues<kDim> step = load_mean<kDim>(steps, kv_head, lane);
#pragma unroll
    for (int i = 0; i < 2 * kEach; ++i) {
      x.v[i / kEach][i % kEach] *= step.v[i / kEach][i % kEach];
    }
  }
}

/// Numbers that are far outside of their ranges are added to *far_outside, unless it is null.
template <int kDim>
__device__ __forceinline__ void divide_by_steps(
    HeadValues<kDim>& x, const float* steps, int kv_head, int lane, uint32_t* far_outside) {
  constexpr int kEach = HeadValues<kDim>::kEach;
  if (steps == nullptr) {
    return;
  }
  const HeadValues<kDim> step = load_mean<kDim>(steps, kv_head, lane);
  unsigned far = 0;
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    const float own = step.v[i / kEach][i % kEach];
    float& number = x.v[i / kEach][i % kEach];
    far += fabsf(number) <= kFarSteps * own ? 0U : 1U;
    number *= own > 0.0F ? __frcp_rn(own) : 0.0F;
  }
  if (far_outside != nullptr && __any_sync(~0U, far != 0)) {
    far = __reduce_add_sync(~0U, far);
    if (lane == 0) {
      atomicAdd_system(far_outside, far);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void normalise(HeadValues<kDim>& x,
                                          const float* weight,
                                          float eps,
                                          int lane) {
  using Values = HeadValues<kDim>;
  float squares = 0.0F;
#pragma unroll
  for (int i = 0; i < 2 * Values::kEach; ++i) {
    const float value = x.v[i / Values::kEach][i % Values::kEach];
    squares = fmaf(value, value, squares);
  }
  const float factor = rsqrtf(sum_warp(squares) / kDim + eps);
  if (lane < Values::kLanes) {
#pragma unroll
    for (int i = 0; i < 2 * Values::kEach; ++i) {
      const int half = i / Values::kEach;
      const int d = half * (kDim / 2) + lane * Values::kEach + i % Values::kEach;
      x.v[half][i % Values::kEach] *= factor * weight[d];
    }
  }
}

/// Cosine and sine within 1e-11 of an angle below 10^9: of its rest of quarter turns, by their
/// Taylor polynomials.
__device__ __forceinline__ void cosine_and_sine(double angle, double& cosine, double& sine) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: integers are the low bits of the sum
  const double turned = fma(angle, 0.63661977236758134, kRound);
  const int quarters = __double2loint(turned);
  double r = fma(turned - kRound, -1.5707963267948966, angle);
  r = fma(turned - kRound, -6.123233995736766e-17, r);
  const double x = r * r;
  double s = fma(x, -1.0 / 39916800.0, 1.0 / 362880.0);
  s = fma(s, x, -1.0 / 5040.0);
  s = fma(s, x, 1.0 / 120.0);
  s = fma(s, x, -1.0 / 6.0);
  s = fma(s * x, r, r);
  double c = fma(x, 1.0 / 479001600.0, -1.0 / 3628800.0);
  c = fma(c, x, 1.0 / 40320.0);
  c = fma(c, x, -1.0 / 720.0);
  c = fma(c, x, 1.0 / 24.0);
  c = fma(c, x, -0.5);
  c = fma(c, x, 1.0);
  const bool odd = (quarters & 1) != 0;
  cosine = odd ? s : c;
  sine = odd ? c : s;
  cosine = ((quarters + 1) & 2) != 0 ? -cosine : cosine;
  sine = (quarters & 2) != 0 ? -sine : sine;
}

/// A position's rotation of the pairs that a lane holds.
template <int kDim>
struct Rotation {
  static constexpr int kEach = HeadValues<kDim>::kEach;
  float cosine[kEach];
  float sine[kEach];  // the frequencies at first

  __device__ __forceinline__ void load(const AppendArgs& args, int32_t row, int lane) {
    const int32_t at = row * args.inv_freq_stride + lane * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      sine[i] = lane < HeadValues<kDim>::kLanes ? __ldg(args.inv_freq + at + i) : 0.0F;
    }
  }
  __device__ __forceinline__ void set(const AppendArgs& args, int32_t position) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      double c = 0.0;
      double s = 0.0;
      cosine_and_sine(static_cast<double>(position) * sine[i], c, s);
      cosine[i] = static_cast<float>(c * args.attention_factor);
      sine[i] = static_cast<float>(s * args.attention_factor);
    }
  }
  __device__ __forceinline__ void apply(HeadValues<kDim>& x) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float a = x.v[0][i];
      const float b = x.v[1][i];
      x.v[0][i] = __fmaf_rn(a, cosine[i], __fmul_rn(b, -sine[i]));
      x.v[1][i] = __fmaf_rn(b, cosine[i], __fmul_rn(a, sine[i]));
    }
  }
};

/// Rounds a row to multiples of 2^-places of the power of two in its largest magnitude.
template <int kDim>
__device__ __forceinline__ void round_row(HeadValues<kDim>& x, int places) {
  constexpr int kEach = HeadValues<kDim>::kEach;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    largest = max(largest, __float_as_uint(x.v[i / kEach][i % kEach]) & 0x7fffffffU);
  }
  const uint32_t power = __reduce_max_sync(~0U, largest) & 0x7f800000U;
  const float shift = __uint_as_float(power) * rounding_shift(places);
#pragma unroll
  for (int i = 0; i < 2 * kEach; ++i) {
    float& value = x.v[i / kEach][i % kEach];
    value = __fsub_rn(__fadd_rn(value, shift), shift);
  }
}

/// Hands on a head's pairs of neighbours in bf16: write(first of them, both).
template <int kDim, typename Write>
__device__ __forceinline__ void write_pairs(const HeadValues<kDim>& x, int lane, Write write) {
  constexpr int kEach = HeadValues<kDim>::kEach;
  if (lane < HeadValues<kDim>::kLanes) {
#pragma unroll
    for (int i = 0; i < 2 * kEach; i += 2) {
      const int half = i / kEach;
      write(half * (kDim / 2) + lane * kEach + i % kEach,
            ptx::pack_bf16(x.v[half][i % kEach], x.v[half][i % kEach + 1]));
    }
  }
}

/// Writes a head of q.
template <int kDim>
__device__ __forceinline__ void store_query(const HeadValues<kDim>& x, uint16_t* to, int lane) {
  write_pairs<kDim>(x, lane,
                    [&](int d, uint32_t two) { *reinterpret_cast<uint32_t*>(to + d) = two; });
}

/// Bytes of a half-row's `kCount` bytes from `byte` on.
template <int kCount>
__device__ __forceinline__ void store_bytes(uint8_t* at, uint64_t bits) {
  if constexpr (kCount == 1) {
    *at = static_cast<uint8_t>(bits);
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(bits);
  } else if constexpr (kCount == 4) {
    *reinterpret_cast<uint32_t*>(at) = static_cast<uint32_t>(bits);
  } else {
    *reinterpret_cast<uint64_t*>(at) = bits;
  }
}

/// The same read.
template <int kCount>
__device__ __forceinline__ uint64_t load_bytes(const uint8_t* at) {
  if constexpr (kCount == 1) {
    return *at;
  } else if constexpr (kCount == 2) {
    return *reinterpret_cast<const uint16_t*>(at);
  } else if constexpr (kCount == 4) {
    return *reinterpret_cast<const uint32_t*>(at);
  } else {
    return *reinterpret_cast<const uint64_t*>(at);
  }
}

/// Where K (or V) of a tile's tokens lie: in the cache, or in a copy of the tile.
struct HeadPlace {
  uint8_t* rows;
  uint8_t* parameters;
};

/// K (or V) of a tile at `tile`.
template <KvCode kCode, int kDim>
__device__ __forceinline__ HeadPlace head_place(uint8_t* tile, bool is_value) {
  constexpr int kRows = kv_tile_rows_bytes(kCode, kDim);
  constexpr int kParameters = kv_key_parameter_bytes(kCode, kDim);
  return {tile + (is_value ? kRows : 0), tile + 2 * kRows + (is_value ? kParameters : 0)};
}

/// A head in the cache's format: a lane's bytes of each half, and the bits of the row's parameters
/// where it has any.
struct HeadCodes {
  uint64_t half[2];
  uint32_t parameters;
};

/// Bytes of a lane's elements of each half of a head.
template <KvCode kCode, int kDim>
[[nodiscard]] constexpr int lane_bytes() {
  return static_cast<int>(kv_row_bytes(kCode, kDim)) * HeadValues<kDim>::kEach / kDim;
}

/// Rounds K or V of one token, by a warp.
///   factor  of formats with scales of a layer, 1 / scale
template <KvCode kCode, int kDim>
__device__ __forceinline__ HeadCodes code_head(const HeadValues<kDim>& x, float factor, int lane) {
  HeadCodes codes = {};
  float offset = 0.0F;
  if constexpr (kv_parameters(kCode) > 0) {
    const auto parameters = KvForm<kCode>::fit(x, lane);
    const float scale = scale_of(parameters);
    offset = offset_of(parameters);
    factor = scale > 0.0F ? 1.0F / scale : 0.0F;
    codes.parameters = bits_of(parameters);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    codes.half[half] = KvForm<kCode>::codes(x.v[half], factor, offset);
  }
  return codes;
}

/// Writes the parameters of K or V of one token, by one lane.
template <KvCode kCode>
__device__ __forceinline__ void store_parameters(uint32_t bits, int token, uint8_t* parameters) {
  constexpr int kBytes = 2 * kv_parameters(kCode);
  if constexpr (kBytes > 0) {
    store_bytes<kBytes>(parameters + kv_parameter_index(kCode, token) * kBytes, bits);
  }
}

/// Writes K or V of one token, by a warp.
template <KvCode kCode, int kDim>
__device__ __forceinline__ void store_head(const HeadCodes& codes,
                                           int token,
                                           int lane,
                                           const HeadPlace& place) {
  constexpr int kRow = static_cast<int>(kv_row_bytes(kCode, kDim));
  constexpr int kBytes = lane_bytes<kCode, kDim>();
  if (lane == 0) {
    store_parameters<kCode>(codes.parameters, token, place.parameters);
  }
  if (lane < HeadValues<kDim>::kLanes) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int byte = half * (kRow / 2) + lane * kBytes;
      store_bytes<kBytes>(place.rows + kv_row_offset(kRow, token, byte), codes.half[half]);
    }
  }
}

}  // namespace nibble::cuda
