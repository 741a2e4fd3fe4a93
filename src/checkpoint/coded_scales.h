#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/source_coded.h"

namespace nibble {

/// Scales and zero points of one row, by group.
struct ScalesOfRow {
  std::vector<float> scales;
  std::vector<float> zeros;  // in the signed codes of decode_levels(); empty: none
};

/// What the codes of one matrix are multiplied with: scales of all stages, zero points, groups.
class CodedScales final {
 public:
  /// Both must outlive the object.
  CodedScales(const CheckpointReader& reader, const CodedFacts& facts)
      : reader_(reader), facts_(facts) {}

  /// Whether a stored shape says what codes and scales say.
  [[nodiscard]] Status check_shape() const;
  /// The group of each column; empty when the groups are runs of columns.
  [[nodiscard]] Result<std::vector<int32_t>> read_groups() const;
  [[nodiscard]] bool has_zeros() const { return facts_.zero.form != ZeroLayout::Form::kNone; }
  /// Room for read().
  [[nodiscard]] ScalesOfRow one_row() const;
  /// kCorrupt for what is NaN or infinite, and for zero points other than zero where they must be.
  Status read(int64_t row, ScalesOfRow& out) const;

 private:
  [[nodiscard]] Status corrupt(const TensorInfo& tensor, const std::string& what) const;
  [[nodiscard]] Status scale_error(const ScaleLayout& layout, int64_t index, float value) const;
  Status apply_outer(int64_t row, ScalesOfRow& out) const;
  Status read_zeros(int64_t row, ScalesOfRow& out) const;

  const CheckpointReader& reader_;
  const CodedFacts& facts_;
};

}  // namespace nibble
