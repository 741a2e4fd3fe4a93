#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/cuda/cuda_gemm.h"
#include "backend/cuda/expert_kernels.h"
#include "backend/prepared_experts.h"

namespace nibble::cuda {

/// Memory that the experts of one layer at a time use, in stream order, shared by all layers of a
/// backend. It grows while layers are prepared.
class ExpertScratch final {
 public:
  /// Numbers of a step of these sizes.
  struct Sizes {
    int64_t rows = 0;
    int64_t top_k = 0;
    int64_t experts = 0;
    int64_t hidden = 0;
    int64_t width = 0;
    int64_t row_scales = 1;  // most scales of a row of x

    [[nodiscard]] int64_t slots() const { return rows * top_k; }
    /// Tiles of any choice, whatever their rows.
    [[nodiscard]] int64_t tiles() const { return slots(); }
  };
  Status reserve(const Sizes& sizes);
  /// Bytes that a row of a step takes in it.
  [[nodiscard]] static int64_t row_bytes(int64_t top_k, int64_t hidden, int64_t width);

  DeviceBuffer logits;    // [rows, experts] f32
  DeviceBuffer chosen;    // [rows, top_k] int32
  DeviceBuffer weights;   // [rows, top_k] f32
  DeviceBuffer slot_of;   // [rows, top_k] int32
  DeviceBuffer row_of;    // [slots] int32
  DeviceBuffer tiles;     // [slots] ExpertTile
  DeviceBuffer x;         // [slots, hidden or width] of up to 2 bytes
  DeviceBuffer x_scales;  // [slots, row_scales] f32
  DeviceBuffer gate_up;   // [slots, 2 width] bf16
  DeviceBuffer down;      // [slots, hidden] f32
};

/// The experts of one layer: rows are routed and their slots ordered on the GPU, so that the host
/// knows nothing of the choice and a recorded step is right for any.
class CudaExperts final : public PreparedExperts {
 public:
  using Matrices = std::vector<std::unique_ptr<CudaGemm>>;
  struct Parts {
    Matrices gate_up;  // of each expert
    Matrices down;
  };

  /// kResourceExhausted.
  static Result<std::unique_ptr<PreparedExperts>> create(const ExpertsRequest& request,
                                                         Parts parts,
                                                         const GemmContext& context,
                                                         ExpertScratch& memory);

  void run(const ExpertArgs& args) override;
  [[nodiscard]] Result<QuantTensor> unpack(int64_t expert, ExpertPart part) const override;
  Status update(int64_t expert,
                ExpertPart part,
                int64_t first_row,
                const QuantTensor& rows) override;
  [[nodiscard]] std::string_view kernel_name() const override {
    return parts_.gate_up.front()->kernel_name();
  }
  [[nodiscard]] int64_t active_bytes(int64_t experts) const override;

 private:
  /// One of the two products, for every expert.
  struct Side {
    DeviceBuffer packed;  // where each expert's weights lie
    DeviceBuffer bias;    // [experts, n] f32; empty: none
    ActFormat act = ActFormat::kBf16;
    int64_t n = 0;
    int64_t k = 0;
  };

  CudaExperts(const ExpertsRequest& request,
              Parts parts,
              const GemmContext& context,
              ExpertScratch& memory);

  Status upload(Side& side, const Matrices& matrices, std::span<const float> bias);
  [[nodiscard]] int64_t most_row_scales() const;
  [[nodiscard]] const Matrices& matrices_of(ExpertPart part) const {
    return part == ExpertPart::kGateUp ? parts_.gate_up : parts_.down;
  }

  void choose(const ExpertArgs& args);
  void gather(const ExpertArgs& args);
  void activate(int64_t slots);
  void multiply(const Side& side, const CudaGemm& kernel, void* y, GemmResult result);

  ExpertsForm form_;
  Parts parts_;
  Side gate_up_;
  Side down_;
  DeviceBuffer router_;  // [experts, hidden] f32
  DeviceBuffer router_bias_;
  DeviceBuffer correction_;
  GemmContext context_;
  ExpertScratch& memory_;
  int64_t experts_ = 0;
  int64_t max_m_ = 0;
  int32_t tile_rows_ = 0;  // of the step that runs
  int64_t max_tiles_ = 0;
};

}  // namespace nibble::cuda
