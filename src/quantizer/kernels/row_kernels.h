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
  const float* importance =
      nullptr;    // [groups, width]: what a weight's squared error counts; null: 1
  float low = 0;  // range of the codes
  float high = 0;
};

/// c[i, j] += sign * sum over t of a[t, i] * b[t, j]: of columns of row-major matrices. The sum
/// begins with 0 and takes t in ascending order, fused.
struct ProductArgs {
  const float* a = nullptr;  // [depth, m]
  int64_t a_stride = 0;
  const float* b = nullptr;  // [depth, n]
  int64_t b_stride = 0;
  float* c = nullptr;  // [m, n]
  int64_t c_stride = 0;
  int64_t m = 0;
  int64_t n = 0;  // a multiple of 16
  int64_t depth = 0;
  float sign = 1;  // or -1
};

/// A block of columns of a matrix whose rows are rounded one column after the other, each with what
/// the errors of the columns before it ask for. All matrices lie column by column.
struct ColumnsArgs {
  const float* w = nullptr;  // [columns, rows]
  float* sums = nullptr;     // [columns, rows]: of errors times factor; those within are added here
  float* errors = nullptr;   // [columns, rows] out: w - value
  float* values = nullptr;   // [columns, rows] out
  const float* const* scales = nullptr;  // of each column: [rows]
  const float* const* zeros = nullptr;   // likewise; null without zero points
  const float* factor = nullptr;         // [columns, columns], upper triangle
  int64_t factor_stride = 0;
  int64_t columns = 0;
  int64_t rows = 0;  // a multiple of 16, and what columns are apart
};

/// Codes of a block of columns, each chosen anew given all others. All matrices lie column by
/// column.
struct SweepArgs {
  float* gradients = nullptr;            // [columns, rows]: H e of e = w - value; kept up to date
  float* values = nullptr;               // [columns, rows], replaced where another code is better
  float* changes = nullptr;              // [columns, rows] out: by how much values became less
  const float* const* scales = nullptr;  // of each column: [rows]
  const float* const* zeros = nullptr;   // likewise; null without zero points
  const float* gram = nullptr;           // [columns, columns]: of H
  int64_t gram_stride = 0;
  float damping = 0;  // that the diagonal lacks
  int64_t columns = 0;
  int64_t rows = 0;  // a multiple of 16, and what columns are apart
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
  void (*add_products)(const ProductArgs& args);
  /// The same of a [m, depth]: of its rows, a_stride apart.
  void (*add_row_products)(const ProductArgs& args);
  using Columns = void (*)(const ColumnsArgs& args);
  Columns columns_int4;
  Columns columns_int4_zeros;
  Columns columns_int8;
  Columns columns_fp4;
  using Sweep = void (*)(const SweepArgs& args);
  Sweep sweep_int4;
  Sweep sweep_int4_zeros;
  Sweep sweep_int8;
  Sweep sweep_fp4;
  void (*progressive)(const ProgressiveArgs& args, Sums& sums);
  /// Offset binary words in sequential order to two's complement in the order 0 2 4 6 1 3 5 7.
  void (*reorder)(uint8_t* words, int64_t count);
};

extern const RowKernels kScalarRows;
extern const RowKernels kAvx2Rows;
extern const RowKernels kAvx512Rows;

}  // namespace nibble::rows
