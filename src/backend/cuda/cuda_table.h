#pragma once

#include <memory>
#include <span>
#include <utility>

#include "backend/backend.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/row_kernels.h"
#include "base/check.h"

namespace nibble::cuda {

/// A table of BF16, F16 or F32 in GPU memory, which an output head may share.
class CudaTable final : public PreparedTable {
 public:
  CudaTable(const QuantView& table,
            std::shared_ptr<const DeviceBuffer> memory,
            DType dtype,
            cudaStream_t stream)
      : rows_(table.n),
        width_(table.k),
        memory_(std::move(memory)),
        dtype_(dtype),
        stream_(stream) {}

  [[nodiscard]] int64_t rows() const override { return rows_; }
  [[nodiscard]] int64_t width() const override { return width_; }
  void gather(const Step& step, float* out) const override {
    const StepInput& input = step.input();
    for (const int32_t token : input.fed ? std::span<const int32_t>() : input.tokens) {
      CHECK_MSG(token >= 0 && token < rows_, "token {} outside 0..{}", token, rows_ - 1);
    }
    must(gather_embeddings(rows_of(step, step.tokens(), out), {stream_}), "embedding");
  }
  void add_positions(const Step& step, int64_t first, float* out) const override {
    EmbeddingArgs args = rows_of(step, step.positions(), out);
    args.first = first;
    args.result = GatherResult::kAdd;
    must(gather_embeddings(args, {stream_}), "positions");
  }

 private:
  [[nodiscard]] EmbeddingArgs rows_of(const Step& step, const int32_t* rows, float* out) const {
    return {.table = memory_->as<void>(),
            .dtype = dtype_,
            .vocab = rows_,
            .tokens = rows,
            .rows = step.rows(),
            .n = width_,
            .out = out};
  }

  int64_t rows_;
  int64_t width_;
  std::shared_ptr<const DeviceBuffer> memory_;
  DType dtype_;
  cudaStream_t stream_;
};

}  // namespace nibble::cuda
