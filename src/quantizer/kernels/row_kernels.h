#pragma once

#include <cstdint>
#include <string_view>

namespace nibble::rows {

inline constexpr int kLanes = 16;
inline constexpr int64_t kMostGroups = 16;        // that one search or extent call takes
inline constexpr int64_t kMostColumnWidth = 128;  // groups up to this are searched side by side

/// Sums over encoded weights, lane by lane, so that their order is the same for every instruction
/// set: lane i adds the weights i, i + 16, i + 32, ... of a call, in single precision for at most
/// 512 weights, then in double.
struct Sums {
  double signal[kLanes] = {};
  double noise[kLanes] = {};
  double product[kLanes] = {};
  double energy[kLanes] = {};
  float max_error[kLanes] = {};
  int64_t clipped = 0;
  int64_t lost = 0;  // weights that are not zero and became zero
};

/// Weights of neighbouring groups and the scales of these. A width that is no multiple of 16 is
/// taken for one group only.
struct EncodeArgs {
  const float* x = nullptr;  // [groups, width], finite
  int64_t groups = 0;
  int64_t width = 0;
  const float* scales = nullptr;  // [groups], not zero
  const float* zeros = nullptr;   // [groups], for encode_int4_zeros
  uint8_t* codes = nullptr;       // groups * width codes as codec.h packs a row; int4 words padded
};

/// FP8 before INT4: code = round(e4m3(x / fp8_scale) * inverse).
struct ProgressiveArgs {
  const float* x = nullptr;  // [width]
  int64_t width = 0;
  float fp8_scale = 0;
  float inverse = 0;
  float scale = 0;  // value of one code step
  uint8_t* codes = nullptr;
};

/// Groups whose scales are searched: at most kMostGroups.
struct SearchArgs {
  const float* x = nullptr;  // [groups, width], finite
  int64_t groups = 0;
  int64_t width = 0;
  const float* absmax = nullptr;  // [groups], not zero where the result is used
  float low = 0;                  // range of the codes
  float high = 0;
};

/// Row arithmetic of one instruction set. All tables give the same bits.
struct RowKernels {
  std::string_view isa;
  using Encode = void (*)(const EncodeArgs& args, Sums& sums);
  using Search = void (*)(const SearchArgs& args, float* scales);

  /// Largest magnitude of each group; infinite or NaN when a weight is.
  void (*absmax)(const float* x, int64_t groups, int64_t width, float* out);
  /// Bits of the largest magnitude of BF16 numbers; beyond those of the largest finite one when a
  /// number is infinite or NaN. Aligned to nothing.
  uint16_t (*absmax_bf16)(const uint8_t* x, int64_t count);
  /// Smallest and largest weight of each group of finite ones.
  void (*minmax)(const float* x, int64_t groups, int64_t width, float* low, float* high);
  /// Ideal scales [groups], before they are rounded to how they are stored. Of magnitudes from
  /// 2^-100 to 2^100: int_scales() brings others there.
  Search lsq;
  Search lsq_signed;
  Search mse;
  /// For groups with zero points of minimum low[] and maximum high[]: the factor (at most 1) by
  /// which the range is best shrunk.
  void (*shrink)(const SearchArgs& args, const float* low, const float* high, float* factors);
  /// For groups of E2M1 with a power of two: which of e - 1, e, e + 1 is best, where powers[] holds
  /// 2^e; replaces powers[].
  void (*exponent)(const SearchArgs& args, float* powers);

  Encode int4;
  Encode int4_zeros;
  Encode int8;
  Encode fp8;
  Encode fp4;
  Encode bf16;
  void (*progressive)(const ProgressiveArgs& args, Sums& sums);
  /// Offset binary words in sequential order to two's complement in the order 0 2 4 6 1 3 5 7.
  void (*reorder)(uint8_t* words, int64_t count);
};

extern const RowKernels kScalarRows;
extern const RowKernels kAvx2Rows;
extern const RowKernels kAvx512Rows;

}  // namespace nibble::rows
