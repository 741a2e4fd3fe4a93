#include "model/block_table.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/check.h"

namespace nibble {

BlockTable::BlockTable(std::unique_ptr<SourceMatrix> source, std::shared_ptr<const void> owner)
    : source_(std::move(source)), owner_(std::move(owner)) {}

void BlockTable::read(int64_t row, float* out) const {
  CHECK_MSG(row >= 0 && row < rows(), "row {} outside 0..{}", row, rows() - 1);
  const Status decoded = source_->decode(row, 1, out);
  CHECK_MSG(decoded.ok(), "{}", decoded.message());
}

void BlockTable::gather(const Step& step, float* out) const {
  for (const int32_t token : step.input().tokens) {
    read(token, out);
    out += width();
  }
}

void BlockTable::add_positions(const Step& step, int64_t first, float* out) const {
  std::vector<float> values(static_cast<size_t>(width()));
  const int32_t* positions = step.positions();
  for (int64_t r = 0; r < step.rows(); ++r, out += width()) {
    read(first + positions[r], values.data());
    std::transform(values.begin(), values.end(), out, out, std::plus<>());
  }
}

}  // namespace nibble
