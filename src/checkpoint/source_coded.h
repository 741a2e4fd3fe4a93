#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/source_kernels.h"
#include "checkpoint/source_matrix.h"
#include "core/buffer.h"

namespace nibble {

/// Where the codes of a matrix [n, k] lie in a tensor, which may hold several matrices.
struct CodeLayout {
  enum class Axis : uint8_t {
    kRows,         // rows of bytes, each row its k codes
    kWordColumns,  // [k / 8, n] words of eight codes along k (GPTQ)
    kAcross,       // [k, n / 8] words of eight codes along n (AWQ)
  };
  const TensorInfo* tensor = nullptr;
  CodeForm form = CodeForm::kInt8;
  NibbleForm nibbles;
  bool four_bits = false;  // kInt8 whose codes must be -8..7
  Axis axis = Axis::kRows;
  int64_t offset = 0;     // bytes in front of row 0, or of word 0
  int64_t row_bytes = 0;  // from a row to the next, or from a row of words to the next
};

/// Numbers in F32, F16, BF16, E4M3 or E8M0, by row and group of the matrix.
struct ScaleLayout {
  const TensorInfo* tensor = nullptr;
  int64_t offset = 0;  // elements in front of row 0
  int64_t row_stride = 0;
  int64_t group_stride = 0;
  int64_t rows_per_scale = 1;

  /// Element of the tensor for a row and a group.
  [[nodiscard]] int64_t index(int64_t row, int64_t group) const {
    return offset + row / rows_per_scale * row_stride + group * group_stride;
  }
  /// NaN for what the type calls so.
  [[nodiscard]] float at(int64_t index) const;
};

/// Zero points by row and group: value = (code - zero) * scale, in the codes of CodeLayout.
struct ZeroLayout {
  enum class Form : uint8_t {
    kNone,
    kBytes,    // I8 [n, groups]
    kOneByte,  // one I8 for all
    kAlongN,   // compressed-tensors: words [n / per_word, groups] of codes of consecutive rows
    kColumns,  // GPTQ, AWQ, Quark: words [groups, n / 8]
  };
  Form form = Form::kNone;
  const TensorInfo* tensor = nullptr;
  NibbleForm nibbles;
  int bits = 4;
  int add = 0;            // GPTQ v1 stores one less, modulo 16
  bool is_fixed = false;  // must mean zero (8; with add, 7 too: writers of GPTQ differ)

  /// Code that means zero, in the signed codes of decode_levels().
  [[nodiscard]] int at(int64_t row, int64_t group, int64_t groups, int64_t n) const;
};

/// Everything that says what the weights of one quantized matrix are: value = (code - zero) * s, in
/// f32, where s is the product of scale and outer scale (or their quotient), rounded to f32.
struct CodedFacts {
  std::string module;
  std::string format;
  int64_t n = 0;
  int64_t k = 0;
  CodeLayout codes;
  ScaleLayout scale;
  ScaleLayout outer;  // tensor == nullptr: none
  bool divide_by_outer = false;
  int64_t group_size = 0;  // along k; groups = ceil(k / group_size)
  bool grouped = false;    // whether the config speaks of groups, if only of one
  ZeroLayout zero;
  const TensorInfo* group_index = nullptr;  // I32 [k]: group of each column
  const TensorInfo* shape = nullptr;        // I32 or I64 [2]: must say [n, k]
  std::vector<const TensorInfo*> unused;    // belong to it, but say nothing about weights

  [[nodiscard]] int64_t groups() const { return (k + group_size - 1) / group_size; }
};

/// A matrix of codes. Shapes must have been checked: every index within its tensor.
std::unique_ptr<SourceMatrix> make_coded_source(const CheckpointReader& reader, CodedFacts facts);

/// The two numbers of a weight_shape. kCorrupt unless it holds two I32 or I64.
Result<std::pair<int64_t, int64_t>> read_shape_tensor(const CheckpointReader& reader,
                                                      const TensorInfo& tensor);

}  // namespace nibble
