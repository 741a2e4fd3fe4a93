#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "backend/cuda/all_experts.h"
#include "backend/cuda/device_blocks.h"
#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/input_rounding.h"
#include "backend/cuda/packed_matrices.h"
#include "backend/expert_drifts.h"
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
    int64_t experts = 0;  // that rows choose from
    int64_t hidden = 0;
    int64_t width = 0;
    int64_t row_scales = 1;  // most scales of a row of x

    [[nodiscard]] int64_t slots() const { return rows * top_k; }
    /// Tiles of two lists of any choice, whatever their rows.
    [[nodiscard]] int64_t tiles() const { return 2 * slots(); }
  };
  Status reserve(const Sizes& sizes);
  /// Bytes that a row of a step takes in it.
  [[nodiscard]] static int64_t row_bytes(int64_t top_k, int64_t hidden, int64_t width);

  DeviceBuffer logits;      // [rows, experts] f32
  DeviceBuffer chosen;      // [rows, top_k] int32
  DeviceBuffer weights;     // [rows, top_k] f32
  DeviceBuffer slot_of;     // [rows, top_k] int32
  DeviceBuffer expert_of;   // [slots] int32
  DeviceBuffer tiles;       // [2, slots] ExpertTile
  DeviceBuffer tile_count;  // [2] int32, then the slots of experts that are there
  DeviceBuffer counts;      // ExpertCounts of all layers so far
  DeviceBuffer x;           // [slots, hidden or width] of up to 2 bytes
  DeviceBuffer x_scales;    // [slots, row_scales] f32, of blocks as int_blocks.h says
  DeviceBuffer gate_up;     // [slots, 2 width] bf16, or what the activation makes of it
  DeviceBuffer down;        // [slots, hidden] f32
};

/// The experts of one layer: rows are routed and their slots ordered on the GPU, so that the host
/// knows nothing of the choice and a recorded step is right for any. Where the kernel computes all
/// experts (AllExpertsGemm), every expert has a slot for every row of a part of the step.
class CudaExperts final : public PreparedExperts, public ExpertDrifts {
 public:
  struct Part {  // of every expert
    std::shared_ptr<PackedMatrices> weights;
    std::shared_ptr<const DeviceExpertBlocks> blocks;  // of its rows, where they are of kIntBlocks
  };
  struct Parts {
    Part gate_up;
    Part down;
  };

  /// kResourceExhausted.
  static Result<std::unique_ptr<PreparedExperts>> create(const ExpertsRequest& request,
                                                         Parts parts,
                                                         const GemmContext& context,
                                                         ExpertScratch& memory);

  void run(const ExpertArgs& args) override;
  /// Waits, to know how many rows each expert has.
  void add_rows(const ExpertView& view, std::span<SiteMath* const> sums) override;
  void keep_down_rows(const ExpertView& view, void* out) override;
  void add_rows_and_drifts(const ExpertView& view,
                           std::span<SiteMath* const> sums,
                           const void* wanted) override;
  [[nodiscard]] Result<QuantTensor> unpack(int64_t expert, ExpertPart part) const override;
  Status update(int64_t expert,
                ExpertPart part,
                int64_t first_row,
                const QuantTensor& rows) override;
  [[nodiscard]] std::string_view kernel_name() const override {
    return gate_up_.weights->kernel_name();
  }
  [[nodiscard]] bool recordable() const override;
  [[nodiscard]] int64_t active_bytes(int64_t experts) const override;

 private:
  /// One of the two products, for every expert.
  struct Side {
    std::shared_ptr<PackedMatrices> weights;
    std::shared_ptr<const DeviceExpertBlocks> blocks;
    const AllExpertsGemm* all = nullptr;  // its kernel, where it computes all experts
    DeviceBuffer bias;                    // [experts, n] f32; empty: none
    ActFormat act = ActFormat::kBf16;
    int64_t n = 0;
    int64_t k = 0;

    /// Scales of a row.
    [[nodiscard]] int64_t scales() const;
  };

  /// What a product reads, rounded for it.
  struct Rows {
    const void* data = nullptr;
    GroupedRows rows = GroupedRows::kOfSlots;
  };

  CudaExperts(const ExpertsRequest& request,
              Parts parts,
              const GemmContext& context,
              ExpertScratch& memory);

  [[nodiscard]] int64_t most_row_scales() const;
  [[nodiscard]] const Side& side_of(ExpertPart part) const {
    return part == ExpertPart::kGateUp ? gate_up_ : down_;
  }

  [[nodiscard]] ExpertScratch::Sizes sizes() const;
  [[nodiscard]] RouteRowsArgs routing(const ExpertArgs& args) const;
  /// How the rows of a step are cut into tiles.
  void cut_tiles(int64_t rows);
  /// Chooses the experts of a view; their products have what it shows in front of them.
  void begin_view(const ExpertView& view);
  /// Copies rows [rows, k] in BF16 to their slots.
  void scatter_plain(const void* rows, int64_t count, void* to) const;
  /// The slots' rows as a product reads them, before they are rounded to its form.
  InputRounding rows_of_view(const ExpertView& view);
  /// The same of down, behind the product of gate and up.
  [[nodiscard]] InputRounding down_input(int64_t slots) const;
  /// Of every expert, in the step that was routed last; waits.
  [[nodiscard]] std::vector<int64_t> rows_of_experts(int64_t rows) const;
  void compute_logits(const ExpertArgs& args, const LaunchContext& launch);
  void choose(const ExpertArgs& args);
  /// x of gate and up, in their form.
  const void* round_rows(const ExpertArgs& args);
  void scatter(const ExpertArgs& args);
  void activate(int64_t slots);
  void combine(const ExpertArgs& args, const LaunchContext& launch);
  /// Waits for the step's branch, if there is one; how what reads its results is launched, next.
  [[nodiscard]] LaunchContext join() const;
  /// How the first launch of a product is launched.
  [[nodiscard]] LaunchContext first_launch(const Side& side) const;
  /// The product of one side with what it reads, whose rows are rounded, by a launch for each list
  /// of tiles. Bf16 of gate and up, F32 of down.
  void multiply(const Side& side, const Rows& x, int64_t slots);
  /// All experts for all rows.
  void run_all(const ExpertArgs& args);
  void multiply_all(const Side& side, AllExpertsLaunch args);

  ExpertsForm form_;
  Side gate_up_;
  Side down_;
  DeviceBuffer router_;  // [planes, all experts, hidden] bf16
  int router_planes_ = 1;
  DeviceBuffer router_bias_;
  DeviceBuffer correction_;
  GemmContext context_;
  ExpertScratch& memory_;
  int64_t first_expert_ = 0;
  int64_t experts_ = 0;      // that are there
  int64_t all_experts_ = 0;  // that rows choose from
  int64_t max_m_ = 0;
  bool activates_ = false;  // the product of gate and up does it
  // Of the step that runs:
  DType down_type_ = DType::kF32;
  TileRows cut_;
  int64_t max_tiles_ = 0;
};

}  // namespace nibble::cuda
