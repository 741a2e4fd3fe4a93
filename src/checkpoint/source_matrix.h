#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {

/// One matrix [n, k] of a checkpoint (n output channels), however it is stored: plain, quantized,
/// packed along either axis, or a slice of a tensor that holds all experts. Immutable; all methods
/// may be called from several threads. Valid as long as the reader.
class SourceMatrix {
 public:
  virtual ~SourceMatrix() = default;
  SourceMatrix(const SourceMatrix&) = delete;
  SourceMatrix& operator=(const SourceMatrix&) = delete;

  /// Values of rows [row, row + rows) into out [rows, k] f32: exactly what the stored codes and
  /// scales mean, rounded once to f32; scales of several stages are first multiplied (divided by a
  /// global scale) in f32. Infinities and NaN of plain weights pass; a NaN code of an
  /// 8-bit float or a scale that is NaN or infinite is kCorrupt, naming file, tensor and place.
  virtual Status decode(int64_t row, int64_t rows, float* out) const = 0;
  /// The mapped bytes that decode() of these rows touches: for reading ahead and dropping pages.
  [[nodiscard]] virtual std::vector<std::span<const std::byte>> touched(int64_t row,
                                                                        int64_t rows) const = 0;

  /// Module, without ".weight": "model.layers.0.mlp.experts.3.up_proj".
  [[nodiscard]] const std::string& module() const { return module_; }
  [[nodiscard]] int64_t n() const { return n_; }
  [[nodiscard]] int64_t k() const { return k_; }
  /// How it is stored, for people: "BF16", "fp8 blocks of 128x128", "GPTQ int4 g128".
  [[nodiscard]] const std::string& format() const { return format_; }
  /// The stored tensors that it is made of, codes first. A tensor of all experts belongs to many.
  [[nodiscard]] const std::vector<const TensorInfo*>& tensors() const { return tensors_; }
  /// "model-00001-of-00002.safetensors: tensor X": the beginning of error messages.
  [[nodiscard]] const std::string& where() const { return where_; }

 protected:
  SourceMatrix() = default;

  std::string module_;
  int64_t n_ = 0;
  int64_t k_ = 0;
  std::string format_;
  std::vector<const TensorInfo*> tensors_;
  std::string where_;
};

/// Bytes of all parts, as touched() lists them.
[[nodiscard]] int64_t bytes_of(std::span<const std::span<const std::byte>> parts);

/// decode() that lets the pages go which it has read: of the reader that the matrix belongs to.
Status decode_once(const SourceMatrix& matrix,
                   const CheckpointReader& reader,
                   std::pair<int64_t, int64_t> row_and_count,
                   float* out);

/// All that a checkpoint stores.
struct SourceModel {
  std::vector<std::unique_ptr<SourceMatrix>> matrices;  // in file order of their codes
  std::vector<const TensorInfo*> others;  // norms, biases, router corrections: in file order
};

/// Finds every matrix of a checkpoint and how it is stored, from headers and config alone: plain
/// F32, F16 and BF16 `X.weight` of two dimensions, and every quantized form that docs/formats.md
/// lists as read. Which tensors exist decides; the config only says how codes are to be read.
///   config  parsed config.json (quantization_config at the top or under text_config)
/// Errors: kCorrupt (shapes that contradict, missing or duplicate scales), kUnsupported (a layout
/// or field that is not read), naming file, tensor or field, and the remedy.
Result<SourceModel> list_source_matrices(const CheckpointReader& reader, const Json& config);

}  // namespace nibble
