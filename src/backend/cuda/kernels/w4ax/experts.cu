// The experts of a layer in blocks of 4 and 8 bits (w4ax/experts.cuh) for all GPUs, with the bits
// of dense products.

#include <algorithm>
#include <span>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/w4ax/experts.cuh"
#include "backend/cuda/kernels/w4ax/experts.h"
#include "backend/cuda/kernels/w4ax/packed.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kFew = 16;  // rows of an expert that are multiplied apart from others'
// Blocks of a grid, as a multiple of what multiprocessors hold: a list may have far fewer tiles
// than it has room for, and blocks without work take time, too.
constexpr int kRounds = 2;

/// One instance of the kernel.
struct Instance {
  int tokens = 0;
  int resident = 0;  // blocks of a multiprocessor
  size_t shared_bytes = 0;
  void (*kernel)(W4AxExpertsArgs args) = nullptr;
};

template <typename Form, typename Tile>
constexpr Instance instance() {
  return {.tokens = Tile::kTokens,
          .resident = Tile::kResident,
          .shared_bytes = size_t{Tile::kStages} * W4AxExpertsStage<Form, Tile>::kBytes,
          .kernel = w4ax_experts<Form, Tile>};
}

/// Fewest tokens first. Up to 16 as many blocks as leave three stages of weights of each under way
/// fill the shared memory of a multiprocessor.
template <typename Form>
constexpr Instance kInstances[] = {
    instance<Form, W4AxExpertsTile<8, 4, 5>>(), instance<Form, W4AxExpertsTile<16, 4, 4>>(),
    instance<Form, W4AxExpertsTile<32, 4, 3>>(), instance<Form, W4AxExpertsTile<64, 3, 2>>()};

std::span<const Instance> instances_of(const WeightFormat& weight) {
  switch (weight.group_size) {
    case 128:
      return kInstances<W4AxForm<1>>;
    case 64:
      return kInstances<W4AxForm<2>>;
    default:
      return kInstances<W4AxForm<4>>;
  }
}

class W4AxExperts final : public W4AxPacked {
 public:
  W4AxExperts(const GemmProblem& problem, const DeviceInfo& device)
      : W4AxPacked(problem), instances_(instances_of(problem.weight)), sms_(device.sms) {}

  static Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem,
                                                  const DeviceInfo& device) {
    auto experts = std::make_unique<W4AxExperts>(problem, device);
    for (const Instance& each : experts->instances_) {
      NIBBLE_RETURN_IF_ERROR(check(cudaFuncSetAttribute(reinterpret_cast<const void*>(each.kernel),
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(each.shared_bytes)),
                                   kExpertsW4Ax.name));
    }
    return std::unique_ptr<GemmKernel>(std::move(experts));
  }

  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override {
    return kGemmCounterBytes;
  }
  [[nodiscard]] int choose(int64_t m) const override {
    return static_cast<int>(&instance_of(m) - instances_.data());
  }

  [[nodiscard]] TileRows grouped_rows(int64_t mean, int64_t most) const override {
    // Tiles that hold what nearly all experts have, where rows are dealt out by chance.
    const int32_t rows = mean <= 3 ? 8 : mean <= 9 ? 16 : mean <= 20 ? 32 : 64;
    if (rows > kFew || most <= rows) {
      return {rows, rows};
    }
    return most <= 2 * kFew ? TileRows{2 * kFew, 2 * kFew, rows} : TileRows{64, 64, rows};
  }

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    if (args.m < 1 || args.m > INT32_MAX / 2 || !takes(args)) {
      return args.m == 0 ? cudaSuccess : cudaErrorInvalidValue;
    }
    W4AxExpertsArgs own = arguments(args.packed, args.m);
    own.x = static_cast<const uint8_t*>(args.x);
    own.x_scales = args.x_scales;
    own.blocks.all = *args.blocks;
    own.bias = args.bias;
    own.y = args.y;
    own.y_stride = args.y_stride;
    own.result = args.result;
    own.m = static_cast<int>(args.m);
    const Instance& of = instance_of(args.m);
    return start(of, ceil_div(args.m, int64_t{of.tokens}), own, context);
  }

  cudaError_t run_grouped(const GroupedLaunch& args, const LaunchContext& context) const override {
    if (args.slots == 0) {
      return cudaSuccess;
    }
    if (args.blocks == nullptr || !takes({.blocks = &args.blocks->all}) || args.max_tiles < 1 ||
        args.slots > INT32_MAX / 2 || args.tile_rows > instances_.back().tokens ||
        args.activation != GemmInput::Kind::kPlain || args.result == GemmResult::kAddF32 ||
        args.rows != GroupedRows::kOfSlots) {
      return cudaErrorInvalidValue;
    }
    W4AxExpertsArgs own = arguments(args.packed, args.slots);
    own.expert_bytes = args.expert_bytes;
    own.x = static_cast<const uint8_t*>(args.x);
    own.x_scales = args.x_scales;
    own.blocks = *args.blocks;
    own.bias = args.bias;
    own.y = args.y;
    own.y_stride = n();
    own.result = args.result;
    own.tiles = args.tiles;
    own.tile_count = args.tile_count;
    own.beside = args.beside;
    return start(instance_of(args.tile_rows), args.max_tiles, own, context);
  }

 private:
  /// The least one whose tiles hold so many rows, or the largest.
  [[nodiscard]] const Instance& instance_of(int64_t rows) const {
    const auto found = std::ranges::find_if(
        instances_, [rows](const Instance& each) { return rows <= each.tokens; });
    return found == instances_.end() ? instances_.back() : *found;
  }

  /// rows: that the scales of x lie for.
  [[nodiscard]] W4AxExpertsArgs arguments(const void* packed, int64_t rows) const {
    return {.packed = static_cast<const uint8_t*>(packed),
            .x_scale_stride = int_scale_stride(rows),
            .n = static_cast<int>(n()),
            .k = static_cast<int>(k()),
            .row_pieces = count().row_pieces,
            .piece_blocks = count().k_blocks};
  }

  [[nodiscard]] cudaError_t start(const Instance& of,
                                  int64_t tiles,
                                  const W4AxExpertsArgs& args,
                                  const LaunchContext& context) const {
    const int64_t columns = ceil_div(n(), int64_t{kExpertChannels});
    const int64_t rows = ceil_div(int64_t{kRounds} * of.resident * sms_, columns);
    const Grid grid{.blocks = dim3(static_cast<unsigned>(columns),
                                   static_cast<unsigned>(std::min(tiles, rows))),
                    .threads = kExpertThreads,
                    .shared_bytes = of.shared_bytes};
    return launch(of.kernel, grid, context, args);
  }

  std::span<const Instance> instances_;
  int sms_;
};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.experts > 0 && is_w4ax(problem) && device.major >= 8 &&
         device.shared_bytes >= 99 * 1024;
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return W4AxExperts::make(problem, device);
}

}  // namespace

const GemmEntry kExpertsW4Ax{
    .name = "experts_w4ax", .accepts = accepts, .make = make, .grouped = true};

}  // namespace nibble::cuda
