// y [m, n] = x [m, k] · (w [n, k] int4)ᵀ with one scale for each channel, where the channels of x
// are in INT8, with one scale for each token, but for blocks of them that are in BF16:
//   y = weight scale * (token scale * sum of INT8 + sum of BF16).
//
// K has the order of wide_order(): K blocks of 128 channels in INT8 in front of those of 64 in
// BF16, 128 bytes of a row of x each. The INT8 sums, which are exact, are turned in place into
// numbers of F32, to which the tensor cores add the products of BF16. Results differ with m as
// those of other products of BF16 do: parts of a tile are added.

#include "backend/cuda/device_blocks.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/gemm_sm90/int4.cuh"
#include "backend/cuda/kernels/w4a8_bf16.h"
#include "backend/cuda/memory.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

struct Int4BesideInt8Codec : Int4ToBf16Codec {
  static constexpr int kUnitRoom = Int4Codec::kUnitBytes;
};

/// Sums of both parts are those of Int4ToBf16Codec.
struct W4A8Bf16Codec {
  using Int8 = Int4Codec;
  using Bf16 = Int4BesideInt8Codec;
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr int kUnitBytes = Int8::kUnitBytes;
  static constexpr int kBlockElements = 128;  // x is bytes
  static constexpr float kScale = Bf16::kScale;
  static constexpr bool kRowScales = true;
};

/// K blocks and where their channels are in K.
struct TwoParts {
  const int32_t* runs = nullptr;  // WideOrder::runs
  int int8_blocks = 0, k_blocks = 0;

  /// Words of a row block's units in front of one.
  [[nodiscard]] __device__ __forceinline__ int words_before(int k_block) const {
    return (k_block + min(k_block, int8_blocks)) * Int4ToBf16Codec::kUnitWords;
  }
  [[nodiscard]] __device__ __forceinline__ int row_words() const { return words_before(k_blocks); }
  /// Column of the codes, or less than 0, that a column of a K block is.
  [[nodiscard]] __device__ __forceinline__ int64_t column_of(int k_block, int within) const {
    const int channel = 64 * (k_block + min(k_block, int8_blocks)) + within;
    const int run = runs[channel / 32];
    return run < 0 ? -1 : int64_t{run} * 32 + channel % 32;
  }
};

// A block for each unit.
__global__ void pack_two_parts(Int4Codes codes, TwoParts parts, uint32_t* units) {
  const int k_block = static_cast<int>(blockIdx.x) % parts.k_blocks;
  const int64_t row_block = static_cast<int>(blockIdx.x) / parts.k_blocks;
  uint32_t* unit = units + row_block * parts.row_words() + parts.words_before(k_block);
  const auto fill = [&]<typename Codec, int kColumns>() {
    for (int i = static_cast<int>(threadIdx.x); i < Codec::kUnitWords;
         i += static_cast<int>(blockDim.x)) {
      unit[i] = Codec::word(i, [&](int row, int column) {
        return codes.at<kColumns>(row_block * 64 + row, parts.column_of(k_block, column));
      });
    }
  };
  if (k_block < parts.int8_blocks) {
    fill.template operator()<Int4Codec, 4>();
  } else {
    fill.template operator()<Int4ToBf16Codec, 2>();
  }
}

// The inverse: a block for each unit, a thread for eight columns of a row in turn, which lie
// together in K.
__global__ void unpack_two_parts(
    const uint32_t* units, TwoParts parts, int64_t n, int64_t k, uint32_t* codes) {
  const int k_block = static_cast<int>(blockIdx.x) % parts.k_blocks;
  const int64_t row_block = static_cast<int>(blockIdx.x) / parts.k_blocks;
  const uint32_t* unit = units + row_block * parts.row_words() + parts.words_before(k_block);
  const bool int8 = k_block < parts.int8_blocks;
  const int eights = int8 ? 16 : 8;  // of a row
  for (int i = static_cast<int>(threadIdx.x); i < 64 * eights; i += static_cast<int>(blockDim.x)) {
    const int row = i / eights, within = i % eights * 8;
    const int64_t column = parts.column_of(k_block, within);
    if (column < 0 || row_block * 64 + row >= n) {
      continue;
    }
    uint32_t word = 0;
    for (int j = 0; j < 8; j += 2) {
      const uint32_t two = int8 ? Int4Codec::four(unit, row, within + j / 4 * 4) >> (j % 4 * 4)
                                : Int4ToBf16Codec::two(unit, row, within + j);
      word |= (two & 0xffU) << (4 * j);
    }
    codes[(row_block * 64 + row) * (k / 8) + column / 8] = word;
  }
}

constexpr GemmSm90Tile kTiles[] = {gemm_tile<W4A8Bf16Codec, GemmTile<8, 1, 2, 6, 2>>(),
                                   gemm_tile<W4A8Bf16Codec, GemmTile<16, 1, 2, 5, 2>>(),
                                   gemm_tile<W4A8Bf16Codec, GemmTile<32, 1, 2, 4, 2>>(),
                                   gemm_tile<W4A8Bf16Codec, GemmTile<64, 1, 2, 6, 1>>(),
                                   gemm_tile<W4A8Bf16Codec, GemmTile<64, 2, 1, 8, 1>>(),
                                   gemm_tile<W4A8Bf16Codec, GemmTile<128, 1, 2, 4, 1>>(),
                                   gemm_tile<W4A8Bf16Codec, GemmTile<128, 2, 1, 6, 1>>()};

// Codes are packed by the kernel itself, which knows the order of K.
constexpr GemmSm90Family kFamily{.name = "gemm_w4a8_bf16_sm90",
                                 .tiles = kTiles,
                                 .unit_bytes = W4A8Bf16Codec::kUnitBytes,
                                 .block_elements = W4A8Bf16Codec::kBlockElements,
                                 .depth = 2};

class W4A8Bf16Sm90 final : public GemmSm90 {
 public:
  static Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem,
                                                  const DeviceInfo& device) {
    CHECK(problem.blocks != nullptr);
    const WideOrder order = wide_order(*problem.blocks);
    NIBBLE_ASSIGN_OR_RETURN(void* encode_map, prepare(kFamily));
    GemmProblem bytes = problem;
    bytes.k = order.rows(nullptr).row_bytes();
    auto kernel = std::make_unique<W4A8Bf16Sm90>(bytes, problem.k, device, encode_map);
    NIBBLE_RETURN_IF_ERROR(kernel->set_order(order));
    return std::unique_ptr<GemmKernel>(std::move(kernel));
  }

  /// bytes: with the bytes of a row of x for k.
  W4A8Bf16Sm90(const GemmProblem& bytes, int64_t k, const DeviceInfo& device, void* encode_map)
      : GemmSm90(kFamily, bytes, device, encode_map), n_(bytes.n), k_(k) {}

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    const bool takes = args.blocks != nullptr && args.blocks->scales == BlockScales::kWide &&
                       args.blocks->wide.int8_blocks == parts_.int8_blocks &&
                       args.blocks->wide.blocks() == parts_.k_blocks;
    return takes ? GemmSm90::run(args, context) : cudaErrorInvalidValue;
  }

 private:
  Status set_order(const WideOrder& order) {
    const size_t bytes = order.runs.size() * sizeof(int32_t);
    NIBBLE_ASSIGN_OR_RETURN(runs_, allocate_device(bytes, "the order of channels"));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(runs_.as<void>(), order.runs.data(), bytes));
    parts_ = {.runs = runs_.as<int32_t>(),
              .int8_blocks = order.int8_blocks,
              .k_blocks = order.int8_blocks + order.bf16_blocks};
    set_int8_blocks(order.int8_blocks);
    return {};
  }
  [[nodiscard]] size_t code_bytes() const override {
    return static_cast<size_t>(row_blocks()) *
           static_cast<size_t>(parts_.k_blocks + parts_.int8_blocks) * Int4ToBf16Codec::kUnitBytes;
  }
  [[nodiscard]] Grid units() const {
    return {.blocks = dim3(static_cast<unsigned>(row_blocks() * parts_.k_blocks)), .threads = 256};
  }
  cudaError_t pack_codes(const void* codes, void* units_of, cudaStream_t stream) const override {
    const Int4Codes from{static_cast<const uint32_t*>(codes), n_, k_};
    return launch(pack_two_parts, units(), {.stream = stream, .overlap = false}, from, parts_,
                  static_cast<uint32_t*>(units_of));
  }
  cudaError_t unpack_codes(const void* units_of, void* codes, cudaStream_t stream) const override {
    return launch(unpack_two_parts, units(), {.stream = stream, .overlap = false},
                  static_cast<const uint32_t*>(units_of), parts_, n_, k_,
                  static_cast<uint32_t*>(codes));
  }

  int64_t n_, k_;
  DeviceBuffer runs_;
  TwoParts parts_;
};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return device.hopper() && is_w4a8_bf16(problem);
}

}  // namespace

const GemmEntry kGemmW4A8Bf16Sm90{
    .name = kFamily.name, .accepts = accepts, .make = W4A8Bf16Sm90::make};

}  // namespace nibble::cuda
