#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/mapped_bytes.h"
#include "quant/quant_view.h"

namespace nibble::cuda {

/// What a matrix consists of.
enum class WeightField : uint8_t { kCodes, kScales, kZeros, kMinimums };

/// The format in which the GPU keeps weights of `format`: F16 and F32, of unquantized weights and
/// of scales and minimums of groups, become BF16, and a scale of the matrix one for each channel.
[[nodiscard]] WeightFormat device_format(WeightFormat format);

/// Codes or numbers of many matrices as one run of bytes for the GPU, made from where they lie by
/// threads that each write a part of it: codes as device_format() has them, all else as f32.
class WeightStream final {
 public:
  /// `copy`: how bytes get here from where they lie.
  explicit WeightStream(CopyBytes* copy = copy_bytes) : copy_(copy) {}

  /// Appends a field of all rows of `part`, which must stay where it is.
  void add(const QuantView& part, WeightField field);
  /// What is added next begins at a multiple of `alignment` bytes; the bytes before hold anything.
  void align(size_t alignment);
  /// Writes bytes [begin, begin + count) to `out`; begin is a multiple of 4.
  void write(size_t begin, size_t count, std::byte* out) const;

  [[nodiscard]] size_t bytes() const { return end_; }
  /// Bytes that add() appends.
  [[nodiscard]] static size_t bytes_of(const QuantView& part, WeightField field);

 private:
  struct Run {
    const QuantView* part = nullptr;
    WeightField field = WeightField::kCodes;
    size_t begin = 0;
    size_t end = 0;
  };

  /// Bytes [begin, begin + count) of a run.
  void write_run(const Run& run, size_t begin, size_t count, std::byte* out) const;
  void write_codes(const QuantView& part, size_t begin, size_t count, std::byte* out) const;
  void write_scales(const QuantView& part, int64_t first, std::span<float> out) const;

  CopyBytes* copy_;
  std::vector<Run> runs_;
  size_t end_ = 0;
};

}  // namespace nibble::cuda
