#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/gemm_sm90/instance.h"

namespace nibble::cuda {

/// How a product is shared among blocks, and the clocks of a multiprocessor that this is reckoned
/// to take.
struct GemmSm90Plan {
  GemmSchedule schedule;
  double clocks = 0.0;
};

/// A product and the device it runs on.
struct GemmSm90Sizes {
  int64_t k = 0, m = 0;
  int row_blocks = 0;
  int sms = 0;
  std::array<int, 4> clusters{};  // of 2, 3, 4 and 8 blocks that may share a tile, at once
};

/// What the families of this main loop differ in. Weights are units of 64 rows x one K block (128
/// bytes of x); rows are filled up to whole units, K to `depth` blocks, with zeros.
struct GemmSm90Family {
  std::string_view name;
  std::span<const GemmSm90Tile> tiles;
  int unit_bytes = 0;
  int block_elements = 0;
  int depth = 1;
  double clocks_per_unit_token = 2.0;  // of the tensor cores
  /// codes [n, k] canonical to units, or back.
  cudaError_t (*pack)(const void* codes, int64_t n, int64_t k, void* units, cudaStream_t) = nullptr;
  cudaError_t (*unpack)(const void* units, int64_t n, int64_t k, void* codes, cudaStream_t) =
      nullptr;
  bool row_scales = true;  // behind the units: those of the matrix, or what pack_scales() makes
  /// Group scales [n, groups] into units that have their codes, or back.
  cudaError_t (*pack_scales)(const float* scales, int64_t n, int64_t k, void* units, cudaStream_t) =
      nullptr;
  cudaError_t (*unpack_scales)(
      const void* units, int64_t n, int64_t k, float* scales, cudaStream_t) = nullptr;
  /// The best plan with this tile, which is not mostly empty; without, a plan for products whose
  /// sums are scaled when they are complete.
  GemmSm90Plan (*plan)(const GemmSm90Tile& tile, const GemmSm90Sizes& sizes) = nullptr;
  /// For the experts of a layer, fewest tokens first; none: run_grouped() is not supported.
  std::span<const GroupedSm90Tile> grouped = {};
};

class GemmSm90 : public GemmKernel {
 public:
  static Result<std::unique_ptr<GemmKernel>> make(const GemmSm90Family& family,
                                                  const GemmProblem& problem,
                                                  const DeviceInfo& device);
  /// Readies a family's kernels for the present device. The driver's cuTensorMapEncodeTiled.
  static Result<void*> prepare(const GemmSm90Family& family);

  /// Of a family that has been prepared.
  GemmSm90(const GemmSm90Family& family,
           const GemmProblem& problem,
           const DeviceInfo& device,
           void* encode_map);
  [[nodiscard]] size_t packed_bytes() const override;
  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override;
  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override;
  [[nodiscard]] size_t workspace_bytes(int64_t max_m) const override;
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override;
  [[nodiscard]] TileRows grouped_rows(int64_t mean, int64_t most) const override;
  cudaError_t run_grouped(const GroupedLaunch& args, const LaunchContext& context) const override;

  /// Index of the tile.
  [[nodiscard]] int choose(int64_t m) const override;
  cudaError_t run_tile(int tile, const GemmLaunch& args, const LaunchContext& context) const;
  /// With another schedule than run_tile()'s: tests and benchmarks.
  cudaError_t run_schedule(int tile,
                           const GemmSchedule& schedule,
                           const GemmLaunch& args,
                           const LaunchContext& context) const;
  [[nodiscard]] GemmSchedule schedule(int tile, int64_t m) const;
  [[nodiscard]] std::span<const GemmSm90Tile> tiles() const { return family_.tiles; }

 protected:
  /// Of the units, and codes to and from them.
  [[nodiscard]] virtual size_t code_bytes() const;
  virtual cudaError_t pack_codes(const void* codes, void* units, cudaStream_t stream) const;
  virtual cudaError_t unpack_codes(const void* units, void* codes, cudaStream_t stream) const;
  [[nodiscard]] int row_blocks() const { return row_blocks_; }
  /// GemmSm90Args::int8_blocks.
  void set_int8_blocks(int blocks) { int8_blocks_ = blocks; }

 private:
  [[nodiscard]] GemmSm90Plan plan(size_t tile, int64_t m, bool in_pairs) const;
  /// Of x [rows, k], in boxes of one K block x box_rows; false where the driver refuses.
  [[nodiscard]] bool map_x(const void* x, int64_t rows, int box_rows, CUtensorMap& map) const;

  const GemmSm90Family& family_;
  int64_t n_, k_;
  int sms_;
  int row_blocks_, k_blocks_;  // of the packed weights
  int int8_blocks_ = 0;
  void* encode_map_;                          // the driver's cuTensorMapEncodeTiled
  std::vector<std::array<int, 4>> clusters_;  // of 2, 3, 4 and 8 blocks at once, for each tile
};

/// Sums stay within an int32: 16 * 8 * 127 or 128 * 127 times k, and -128 in x where it occurs.
inline constexpr int64_t kGemmMaxIntegerK = 131008;

/// Whether the weights are `code` with a scale per channel, without zero points, the activations
/// `act`, and the sizes what GemmSm90 takes.
[[nodiscard]] bool scaled_by_channel_and_token(const GemmProblem& problem,
                                               const DeviceInfo& device,
                                               WeightCode code,
                                               ActFormat act);

/// INT4 weights per channel, or in groups of two levels, x INT8 activations per token; INT8 x INT8;
/// E4M3 x E4M3; INT8 and INT4 per channel x BF16; BF16 x BF16; MXFP4 x E4M3 per token; INT4 per
/// channel x blocks of INT8 and BF16.
extern const GemmEntry kGemmW4A8Sm90;
extern const GemmEntry kGemmW4A8Bf16Sm90;
extern const GemmEntry kGemmW4A8LevelsSm90;
extern const GemmEntry kGemmW8A8Int8Sm90;
extern const GemmEntry kGemmW8A8Fp8Sm90;
extern const GemmEntry kGemmW8A16Sm90;
extern const GemmEntry kGemmW4A16ChannelSm90;
extern const GemmEntry kGemmBf16Sm90;
extern const GemmEntry kGemmMxfp4Fp8Sm90;

}  // namespace nibble::cuda
