#include "layers/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace nibble {

namespace {

/// Runs of neighbouring parts with the same formats, stacked into one matrix each.
Result<std::vector<LinearWeights>> merge_equal_formats(std::vector<LinearWeights> parts) {
  std::vector<LinearWeights> merged;
  size_t begin = 0;
  while (begin < parts.size()) {
    const WeightFormat format = parts[begin].weight.format;
    const ActFormat act = parts[begin].act;
    std::vector<QuantTensor> run;
    size_t end = begin;
    while (end < parts.size() && parts[end].weight.format == format && parts[end].act == act) {
      run.push_back(std::move(parts[end].weight));
      ++end;
    }
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor stacked, stack_rows(std::move(run)));
    merged.push_back(LinearWeights{.weight = std::move(stacked), .act = act});
    begin = end;
  }
  return merged;
}

}  // namespace

Result<QuantTensor> stack_rows(std::vector<QuantTensor> parts) {
  CHECK(!parts.empty());
  if (parts.size() == 1) {
    return std::move(parts.front());
  }
  int64_t n = 0;
  for (const QuantTensor& part : parts) {
    CHECK(part.format == parts.front().format);
    CHECK_EQ(part.k, parts.front().k);
    n += part.n;
  }
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor stacked,
                          QuantTensor::allocate(parts.front().format, n, parts.front().k));
  size_t codes_at = 0;
  size_t scales_at = 0;
  for (const QuantTensor& part : parts) {
    CHECK_LE(codes_at + part.codes.size(), stacked.codes.size());
    CHECK_LE(scales_at + part.scales.size(), stacked.scales.size());
    std::copy_n(part.codes.data(), part.codes.size(), stacked.codes.data() + codes_at);
    std::copy_n(part.scales.data(), part.scales.size(), stacked.scales.data() + scales_at);
    codes_at += part.codes.size();
    scales_at += part.scales.size();
  }
  return stacked;
}

Result<Linear> Linear::prepare(std::vector<LinearWeights> parts,
                               std::vector<float> bias,
                               Backend& backend,
                               int64_t max_rows) {
  CHECK(!parts.empty());
  Linear linear;
  linear.k_ = parts.front().weight.k;
  NIBBLE_ASSIGN_OR_RETURN(std::vector<LinearWeights> merged, merge_equal_formats(std::move(parts)));
  for (LinearWeights& part : merged) {
    CHECK_EQ(part.weight.k, linear.k_);
    const int64_t part_n = part.weight.n;
    NIBBLE_ASSIGN_OR_RETURN(auto gemm,
                            backend.prepare_gemm(std::move(part.weight), part.act, max_rows));
    linear.parts_.push_back(Part{.gemm = std::move(gemm), .first_column = linear.n_});
    linear.n_ += part_n;
  }
  CHECK(bias.empty() || static_cast<int64_t>(bias.size()) == linear.n_);
  linear.bias_ = std::move(bias);
  return linear;
}

int64_t Linear::weight_bytes() const {
  auto bytes = static_cast<int64_t>(bias_.size() * sizeof(float));
  for (const Part& part : parts_) {
    bytes += part.gemm->weight_bytes();
  }
  return bytes;
}

void Linear::forward(const float* x, int64_t rows, float* y, GemmOutput output, Backend& backend) {
  for (const Part& part : parts_) {
    part.gemm->run(GemmArgs{.x = x,
                            .x_stride = k_,
                            .m = rows,
                            .y = y + part.first_column,
                            .y_stride = n_,
                            .output = output});
  }
  if (!bias_.empty()) {
    backend.add_bias(y, rows, n_, bias_.data());
  }
}

}  // namespace nibble
