#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "checkpoint/dialect.h"
#include "checkpoint/linear_slots.h"
#include "quant/scheme.h"
#include "quantizer/rtn.h"

namespace nibble {

/// What a first pass over a matrix, or over matrices that share a scale, learns.
struct Extent {
  float absmax = 0;
};

/// What became of the weights of some rows. Sums are exact enough and taken in a fixed order, so
/// that reports do not depend on threads: add() rows in ascending order.
struct RowsError {
  int64_t count = 0;
  double signal = 0;    // sum of w^2
  double noise = 0;     // sum of (w - decoded)^2
  double product = 0;   // sum of w * decoded
  double energy = 0;    // sum of decoded^2
  float max_error = 0;  // largest |w - decoded|
  int64_t clipped = 0;  // weights beyond the outermost code, by more than half a step
  int64_t zeros = 0;    // weights that are not zero and became zero
  float scale_low = 0;  // smallest and largest magnitude of a scale
  float scale_high = 0;

  void add(const RowsError& next);
  [[nodiscard]] double snr_db() const;
  [[nodiscard]] double cosine() const;
};

/// Weights whose scales are to be chosen.
struct ScaleSearch {
  int64_t rows = 0;
  const float* x = nullptr;  // [rows, k] f32, finite
  const float* importance =
      nullptr;  // [k], positive: how much a column's error counts; null: all alike
};

/// Rows whose values are chosen already, by a method that looks at more than single weights.
struct GivenRows {
  int64_t row = 0;
  int64_t rows = 0;
  const float* x = nullptr;       // [rows, k] f32: what they were made of, for the error
  const float* values = nullptr;  // [rows, k] f32: (code - zero) * scale of some code each
  const float* scales = nullptr;  // [rows, groups] as choose_scales() gives them
  const float* zeros = nullptr;   // [rows, groups]; unused without zero points
};

/// Turns rows of one matrix [n, k] into the bytes of the tensors that store it. Immutable and
/// thread-safe: rows may be encoded in any order and on any thread with the same result.
class MatrixEncoder {
 public:
  virtual ~MatrixEncoder() = default;
  MatrixEncoder(const MatrixEncoder&) = delete;
  MatrixEncoder& operator=(const MatrixEncoder&) = delete;

  /// Whether encode() needs the Extent of all rows (one scale for a tensor).
  [[nodiscard]] virtual bool needs_extent() const = 0;
  /// Rows are encoded in blocks of this many (the last may be shorter): 1, 8 or 128.
  [[nodiscard]] virtual int64_t row_block() const = 0;
  /// The stored tensors, in the order of linear_slots().
  [[nodiscard]] const std::vector<TensorSlot>& slots() const { return slots_; }
  /// Which bytes of slot `slot` rows [row, row + rows) fill; row is a multiple of row_block().
  /// A slot that belongs to no row (a shape, a tensor's one scale) is filled by row 0.
  struct Place {
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  [[nodiscard]] virtual Place place(size_t slot, int64_t row, int64_t rows) const = 0;
  /// Encodes rows [row, row + rows), at most row_block() of them.
  ///   x    [rows, k] f32
  ///   extent  of all rows of all matrices that share the scale; unused unless needs_extent()
  ///   out  one pointer per slot to place(slot, row, rows).bytes bytes; aligned to nothing
  ///   error  out: of these rows alone
  /// kCorrupt for a weight that is NaN or infinite, naming row and column; the caller adds the
  /// tensor. Bytes and sums are the same on every machine.
  virtual Status encode(int64_t row,
                        int64_t rows,
                        const float* x,
                        const Extent& extent,
                        std::span<std::byte* const> out,
                        RowsError& error) const = 0;

  /// Whether the next two may be called: integers and FP4.
  [[nodiscard]] virtual bool takes_given_rows() const { return false; }
  /// The scales [rows, groups], as they are stored, that encode() takes, or with an importance
  /// those that lose least by it; and the zero points, where the format has them.
  virtual void choose_scales(const ScaleSearch& search, float* scales, float* zeros) const;
  /// Whether the scales of a row belong together, so that no method may change one alone.
  [[nodiscard]] virtual bool ties_scales() const { return false; }
  /// encode() of values that are chosen already.
  virtual Status encode_given(const GivenRows& given,
                              const Extent& extent,
                              std::span<std::byte* const> out,
                              RowsError& error) const;

 protected:
  MatrixEncoder() = default;

  std::vector<TensorSlot> slots_;
};

/// How matrices are encoded.
struct EncoderOptions {
  QuantScheme scheme;
  ScaleRule rule = ScaleRule::kBest;
  Dialect dialect = Dialect::kCompressedTensors;  // default_dialect(scheme) unless asked otherwise
  std::string_view isa = "auto";                  // or scalar, avx2, avx512: all give the same bits
};

/// The encoder of matrices [n, k]. kUnsupported when k is no multiple of the group size, or the
/// dialect cannot store the scheme; kInvalidArgument when the rule does not apply to the scheme.
Result<std::unique_ptr<MatrixEncoder>> make_encoder(const EncoderOptions& options,
                                                    int64_t n,
                                                    int64_t k);

/// Largest magnitude of rows [rows, k], for the Extent of an encoder that needs it. kCorrupt for a
/// weight that is NaN or infinite, naming row (counted from `row`) and column.
Result<float> absmax_of(const float* x, int64_t row, int64_t rows, int64_t k);

/// The same of BF16 numbers as they are stored; empty when one of them is not finite.
std::optional<float> absmax_of_bf16(std::span<const std::byte> numbers);

}  // namespace nibble
