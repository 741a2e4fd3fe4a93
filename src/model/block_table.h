#pragma once

#include <memory>

#include "backend/backend.h"
#include "checkpoint/source_matrix.h"

namespace nibble {

/// A table that a GGUF file has in blocks, for backends whose memory is the host's: rows are
/// decoded from where they lie in the file, and of a large one only those of tokens that occur are
/// ever resident.
class BlockTable final : public PreparedTable {
 public:
  /// `owner` keeps what the source reads.
  BlockTable(std::unique_ptr<SourceMatrix> source, std::shared_ptr<const void> owner);

  [[nodiscard]] int64_t rows() const override { return source_->n(); }
  [[nodiscard]] int64_t width() const override { return source_->k(); }
  void gather(const Step& step, float* out) const override;
  void add_positions(const Step& step, int64_t first, float* out) const override;

 private:
  void read(int64_t row, float* out) const;

  std::unique_ptr<SourceMatrix> source_;
  std::shared_ptr<const void> owner_;
};

}  // namespace nibble
