#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/expert_slots.h"
#include "backend/cpu/packed_product.h"
#include "backend/prepared_experts.h"
#include "core/expert_counts.h"

namespace nibble::cpu {

/// Memory that the experts of one layer at a time use, shared by all layers of a backend.
class ExpertWorkspace final {
 public:
  /// Room for so many bytes of rounded rows, numbers of either product's results, and rows.
  struct Sizes {
    int64_t rounded = 0;
    int64_t gate_up = 0;  // bytes
    int64_t down = 0;     // floats
    int64_t logits = 0;   // floats
    int64_t rows = 0;
  };
  Status reserve(const Sizes& sizes);

  [[nodiscard]] uint8_t* rounded() { return reinterpret_cast<uint8_t*>(rounded_.data()); }
  [[nodiscard]] void* gate_up() { return gate_up_.data(); }
  [[nodiscard]] float* down() { return down_.as<float>().data(); }
  [[nodiscard]] float* logits() { return logits_.as<float>().data(); }
  [[nodiscard]] float* scales() { return scales_.as<float>().data(); }
  [[nodiscard]] int32_t* sums() { return sums_.as<int32_t>().data(); }

  /// Adds a run of a layer.
  void count(const ExpertSlots& slots);
  [[nodiscard]] const ExpertCounts& counts() const { return counts_; }

 private:
  Buffer rounded_;
  Buffer gate_up_;
  Buffer down_;
  Buffer logits_;
  Buffer scales_;
  Buffer sums_;
  ExpertCounts counts_;
};

/// The experts of one layer that are there. Of a step's experts only those are read that rows
/// choose, and the tiles of all of them are shared evenly among the threads.
class CpuExperts final : public PreparedExperts {
 public:
  struct Kernels {
    std::unique_ptr<PreparedGemm> router;
    const TiledProduct& gate_up;
    const TiledProduct& down;
  };

  /// The products must accept the request's. kCorrupt for NaN codes, kResourceExhausted.
  static Result<std::unique_ptr<PreparedExperts>> create(const ExpertsRequest& request,
                                                         Kernels kernels,
                                                         const GemmDevice& device,
                                                         ExpertWorkspace& memory);

  void run(const ExpertArgs& args) override;
  void show_rows(const ExpertView& view, ExpertObserver& observer) override;
  [[nodiscard]] Result<QuantTensor> unpack(int64_t expert, ExpertPart part) const override;
  Status update(int64_t expert,
                ExpertPart part,
                int64_t first_row,
                const QuantTensor& rows) override;
  [[nodiscard]] std::string_view kernel_name() const override {
    return gate_up_.products.front().name();
  }
  [[nodiscard]] int64_t active_bytes(int64_t experts) const override;

 private:
  /// One of the two products, for every expert.
  struct Side {
    std::vector<PackedMatrix> matrices;
    std::vector<PackedProduct> products;  // one for all, or, where rows enter otherwise, of each
    std::vector<float> bias;              // [experts, n], or empty
    int64_t row_stride = 0;               // bytes of a rounded row, in tiles or not

    [[nodiscard]] int64_t n() const { return matrices.front().n(); }
    [[nodiscard]] int64_t k() const { return matrices.front().k(); }
    [[nodiscard]] const PackedProduct& product(int32_t expert) const {
      return products[products.size() == 1 ? 0 : static_cast<size_t>(expert)];
    }
  };
  /// A share of one expert's product: tiles of its matrix, for all its rows.
  struct Piece {
    ExpertRows rows;
    TileRange tiles;
  };

  CpuExperts(const ExpertsRequest& request,
             std::unique_ptr<PreparedGemm> router,
             const GemmDevice& device,
             ExpertWorkspace& memory);

  Status pack(Side& side,
              const ExpertsRequest& request,
              ExpertPart part,
              const TiledProduct& product,
              const GemmDevice& device);
  Status reserve();

  void run_rows(const ExpertArgs& args);
  void choose(ConstActivations x, int64_t x_stride, int64_t rows);
  [[nodiscard]] RoundedRows rounded_rows(const Side& side, const ExpertRows& rows);
  void round_inputs(const ExpertArgs& args);
  void round_results(int64_t rows);
  /// wanted: of whose experts; null: all
  void multiply(const Side& side, Activations y, const ExpertObserver* wanted = nullptr);
  void cut_pieces(const Side& side, const ExpertObserver* wanted);
  /// Those of run_rows(); `before` lie in front of them in their step.
  void show_part(const ExpertView& view, int64_t before, ExpertObserver& observer);
  void combine(const ExpertArgs& args);

  ExpertsForm form_;
  int64_t all_experts_;  // that rows choose from
  DType between_;
  std::unique_ptr<PreparedGemm> router_;
  std::vector<float> router_bias_;
  std::vector<float> correction_;
  Side gate_up_;
  Side down_;
  const KernelTable& kernels_;
  Workspace& workspace_;
  ExpertWorkspace& memory_;
  int64_t max_rows_ = 0;  // computed at a time
  ExpertSlots slots_;
  std::vector<Piece> pieces_;
};

}  // namespace nibble::cpu
