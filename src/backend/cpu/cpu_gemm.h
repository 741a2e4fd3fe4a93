#pragma once

#include <array>
#include <string>

#include "backend/backend.h"
#include "backend/cpu/packing.h"
#include "backend/cpu/registry.h"

namespace nibble::cpu {

/// Which scales of weights a product takes.
enum class TiledScales : uint8_t {
  kAny,          // none, per channel, or per group of 8, 16, 32 or a multiple of 32
  kChannel,      // one for each output channel
  kUsualGroups,  // several groups of 32, 64 or 128
};

/// What activations are rounded to besides their ActFormat.
enum class TiledRounding : uint8_t { kNone, kFixed /* FixedRow */ };

/// A product of weights as PackedMatrix lays them out.
struct TiledProduct {
  std::string_view name;
  WeightCode code = WeightCode::kF32;
  std::array<ActFormat, 2> acts = {ActFormat::kFloat, ActFormat::kBf16};  // either
  TiledScales scales = TiledScales::kAny;
  TiledRounding rounding = TiledRounding::kNone;
  ZeroPoints zero_points = ZeroPoints::kNone;
  KernelTable::Gemm GemmKernels::*rows = nullptr;       // for a few rows
  KernelTable::TileGemm TileKernels::*tiles = nullptr;  // for many, with AMX; null: rows only

  [[nodiscard]] bool accepts(const GemmProblem& problem, const GemmDevice& device) const;
};

/// One packed matrix and the kernels that multiply with it: one for a few rows, which reads the
/// weights as fast as memory gives them, and with AMX one for many.
class CpuGemm final : public PreparedGemm {
 public:
  /// `product` must accept the request's problem. kCorrupt for NaN codes, kResourceExhausted.
  static Result<std::unique_ptr<PreparedGemm>> create(const GemmRequest& request,
                                                      const TiledProduct& product,
                                                      const GemmDevice& device);

  void round_rows(const GemmArgs& args) override;
  void multiply(const GemmArgs& args) override;
  [[nodiscard]] bool reads_rows_of(const PreparedGemm& other, int64_t m) const override;
  [[nodiscard]] Result<QuantTensor> unpack() const override { return matrix_.unpack(); }
  Status update(int64_t first_row, const QuantTensor& rows) override;
  [[nodiscard]] std::string_view kernel_name() const override { return name_; }
  [[nodiscard]] int64_t weight_bytes() const override { return matrix_.bytes(); }

 private:
  CpuGemm(PackedMatrix matrix,
          const ActSpec& spec,
          const TiledProduct& product,
          const GemmDevice& device);

  void round_row(const GemmArgs& args, int64_t row, int thread);
  /// What is added to the codes of INT8 rows: some instructions multiply unsigned ones.
  [[nodiscard]] int32_t int8_offset() const;
  /// Pieces of 64 bytes of a row of rounded activations (int8 or bf16).
  [[nodiscard]] int64_t pieces() const;
  /// Bytes of a FixedRow.
  [[nodiscard]] int64_t fixed_stride() const;
  [[nodiscard]] bool takes_input_as_given(const GemmArgs& args) const;
  // Where a row's first piece lies among the tiles of TileGemmTask, and how far apart slabs are.
  [[nodiscard]] uint8_t* tile_row(int64_t row);
  [[nodiscard]] static int64_t slab_stride(int64_t m);
  /// Asks for a row of activations, into the second level: memory is slower than rounding.
  void fetch_row(const GemmArgs& args, int64_t row) const;
  /// The row of activations that the product sees, before rounding: as given or in the buffer.
  ConstNumbers input_row(const GemmArgs& args, int64_t row, float* buffer) const;
  /// A row with its columns in the order of the weights, and within the range of a static scale.
  ConstNumbers specified_row(ConstNumbers row, float* buffer, int thread) const;
  [[nodiscard]] float largest_code() const;
  /// The magnitude to which a static scale gives the largest code; 0: the row has its own.
  ///   row  of specified_row()
  [[nodiscard]] float given_largest(ConstNumbers row) const;
  /// A row rounded to FP8 with a scale for each group, as numbers again.
  void round_fp8_groups(const float* x, float* out) const;
  const float* floats_of(ConstNumbers row, float* buffer) const;
  void multiply_rows(const GemmArgs& args);
  void multiply_tiles(const GemmArgs& args);
  [[nodiscard]] ProductTask product_task(const GemmArgs& args, int64_t row) const;
  [[nodiscard]] bool in_tiles(int64_t m) const;

  PackedMatrix matrix_;
  ActSpec spec_;
  const KernelTable& kernels_;
  Workspace& workspace_;
  bool fixed_ = false;     // activations are a FixedRow
  bool fetch_far_ = true;  // see CpuFeatures
  KernelTable::Gemm row_kernel_ = nullptr;
  KernelTable::TileGemm tile_kernel_ = nullptr;  // null: rows only
  int64_t fewest_tile_rows_ = 0;
  std::string name_;
  int64_t max_m_ = 0;
};

}  // namespace nibble::cpu
