// Rows of the cache for latent attention's expanded form, and which sequences the absorbed form
// leaves out.

#include <algorithm>

#include <cuda_fp16.h>

#include "backend/cuda/expanded.h"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / 32;  // of a block
constexpr int kRowDim = kExpandedRank + kExpandedRope;
constexpr int kListed = 64;        // sequences that a launch leaves out
constexpr int kLineNumbers = 128;  // of a latent in int4, of one scale and offset

struct GatherArgs {
  LatentShape shape;
  ExpandedPiece piece;
  const uint8_t* pages;
  const int32_t* page_table;
  int64_t page_table_stride;
  uint4* latents;
  uint4* rotated;
};

/// Numbers dim..+7 of a cached row in bf16, dim a multiple of 8: what knows how the cache keeps
/// them.
__device__ __forceinline__ uint4 load_eight(const LatentShape& shape,
                                            const uint8_t* page,
                                            int32_t token,
                                            int32_t dim) {
  const uint8_t* const at = page + latent_offset(shape, token, dim);
  const uint8_t* const params = page + latent_params_offset(shape, token);
  if (!shape.coded() || dim >= kExpandedRank) {
    return __ldcg(reinterpret_cast<const uint4*>(at));
  }
  float numbers[8];
  if (shape.code == KvCode::kInt4) {
    const uint32_t codes = __ldcg(reinterpret_cast<const unsigned*>(at));
    const uint32_t line = __ldcg(reinterpret_cast<const unsigned*>(params) + dim / kLineNumbers);
    const float scale = __half2float(__ushort_as_half(static_cast<uint16_t>(line)));
    const float offset = __half2float(__ushort_as_half(static_cast<uint16_t>(line >> 16)));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      numbers[i] = fmaf(static_cast<float>(codes >> (4 * i) & 15U), scale, offset);
    }
  } else {
    const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(at));
    const float scale = __ldcg(reinterpret_cast<const float*>(params));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = (i < 4 ? codes.x : codes.y) >> (8 * (i % 4)) & 0xffU;
      const float number =
          shape.code == KvCode::kInt8
              ? static_cast<float>(static_cast<int8_t>(code))
              : __half2float(__ushort_as_half(static_cast<uint16_t>(ptx::widen_e4m3(code))));
      numbers[i] = number * scale;
    }
  }
  return make_uint4(ptx::pack_bf16(numbers[0], numbers[1]), ptx::pack_bf16(numbers[2], numbers[3]),
                    ptx::pack_bf16(numbers[4], numbers[5]), ptx::pack_bf16(numbers[6], numbers[7]));
}

/// The cache's page and row of a row of the piece; none: -1.
struct GatheredRow {
  int32_t page = -1;
  int32_t token = 0;

  __device__ GatheredRow(const GatherArgs& args, int32_t row) {
    int32_t s = 0;
    while (s + 1 < args.piece.count && args.piece.segments[s + 1].base <= row) {
      ++s;
    }
    const ExpandedSegment& segment = args.piece.segments[s];
    const int32_t inside = row - segment.base;
    if (inside >= 0 && inside < segment.tokens) {
      const int32_t at = segment.first_token + inside;
      page = __ldg(args.page_table + segment.sequence * args.page_table_stride +
                   at / args.shape.page_size);
      token = at % args.shape.page_size;
    }
  }
};

/// A warp for each row of the piece.
__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ GatherArgs args) {
  ptx::allow_successor();
  const auto row = static_cast<int32_t>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  ptx::wait_for_predecessor();
  if (row >= args.piece.tokens) {
    return;
  }
  const GatheredRow from(args, row);
  const uint8_t* const page =
      args.pages + static_cast<int64_t>(max(0, from.page)) * latent_page_bytes(args.shape);
#pragma unroll
  for (int chunk = lane; chunk < kRowDim / 8; chunk += 32) {
    const uint4 eight = from.page < 0 ? make_uint4(0, 0, 0, 0)
                                      : load_eight(args.shape, page, from.token, chunk * 8);
    if (chunk < kExpandedRank / 8) {
      args.latents[int64_t{row} * (kExpandedRank / 8) + chunk] = eight;
    } else {
      args.rotated[int64_t{row} * (kExpandedRope / 8) + chunk - kExpandedRank / 8] = eight;
    }
  }
}

struct LengthArgs {
  const int32_t* from;  // may be where they go to
  int32_t* to;
  int32_t sequences;
  int32_t count;
  int32_t left_out[kListed];
};

__global__ __launch_bounds__(kThreads) void lengths_kernel(
    const __grid_constant__ LengthArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const auto sequence = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (sequence >= args.sequences) {
    return;
  }
  int32_t length = args.from[sequence];
  for (int32_t i = 0; i < args.count; ++i) {
    length = args.left_out[i] == sequence ? 0 : length;
  }
  args.to[sequence] = length;
}

}  // namespace

cudaError_t gather_latents(const GatherLatentsLaunch& launch, const LaunchContext& context) {
  const GatherArgs args{.shape = launch.shape,
                        .piece = *launch.piece,
                        .pages = static_cast<const uint8_t*>(launch.pages),
                        .page_table = launch.step.page_table,
                        .page_table_stride = launch.step.page_table_stride,
                        .latents = static_cast<uint4*>(launch.latents),
                        .rotated = static_cast<uint4*>(launch.rotated)};
  const auto blocks = static_cast<unsigned>((args.piece.tokens + kRows - 1) / kRows);
  return launch.piece->tokens == 0
             ? cudaSuccess
             : cuda::launch(gather_kernel, {dim3(blocks), kThreads, 0}, context, args);
}

cudaError_t leave_out_sequences(const StepMetadata& step,
                                std::span<const int32_t> left_out,
                                int32_t* lengths,
                                const LaunchContext& context) {
  const auto blocks = static_cast<unsigned>((step.sequences + kThreads - 1) / kThreads);
  const int32_t* from = step.kv_len;
  while (!left_out.empty()) {
    const auto listed = left_out.first(std::min(left_out.size(), size_t{kListed}));
    LengthArgs args{.from = from,
                    .to = lengths,
                    .sequences = step.sequences,
                    .count = static_cast<int32_t>(listed.size()),
                    .left_out = {}};
    std::ranges::copy(listed, args.left_out);
    const cudaError_t status =
        cuda::launch(lengths_kernel, {dim3(blocks), kThreads, 0}, context, args);
    if (status != cudaSuccess) {
      return status;
    }
    left_out = left_out.subspan(listed.size());
    from = lengths;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
