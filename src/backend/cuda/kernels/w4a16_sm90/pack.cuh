#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/w4a16_sm90/codecs.cuh"
#include "backend/cuda/launch.h"

// Canonical codes and scales to Int4GroupLayout in the words of a codec, and back.
namespace nibble::cuda {

/// A matrix that is packed. `width`: its rows are a gate's, as many as this, then those of up, and
/// are packed in turns; or 0.
struct Int4GroupSizes {
  int64_t n = 0, k = 0;
  int64_t width = 0;
  // Pairs of units of a row block follow each other along K; otherwise, those of all row blocks.
  bool along_k = false;
};

/// A matrix of codes or scales with the sizes of its packed form.
struct Int4GroupPackArgs {
  void* packed = nullptr;
  void* plain = nullptr;  // codes [n, k / 2], or scales [n, groups] f32
  Int4GroupSizes sizes;
  int64_t k_blocks = 0;  // packed units of a row block, even
  int64_t row_blocks = 0;

  /// Row of the matrix that is packed as row `row`, and the other way round.
  [[nodiscard]] __device__ int64_t source_row(int64_t row) const {
    return sizes.width == 0 ? row : row % 2 * sizes.width + row / 2;
  }
  [[nodiscard]] __device__ int64_t packed_row(int64_t row) const {
    const int64_t width = sizes.width;
    return width == 0 ? row : row < width ? 2 * row : 2 * (row - width) + 1;
  }
};

template <typename Codec>
__device__ uint8_t* int4_group_pair(const Int4GroupPackArgs& args, int64_t block, int64_t k_block) {
  const int64_t pair = args.sizes.along_k ? block * (args.k_blocks / 2) + k_block / 2
                                          : k_block / 2 * args.row_blocks + block;
  return static_cast<uint8_t*>(args.packed) + pair * Codec::Layout::kPairBytes;
}

/// One thread for a packed word; codes beyond n or k are 0 with scales of 0.
template <typename Codec>
__global__ void pack_int4_codes(Int4GroupPackArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t unit = index / 512;
  const int64_t block = unit / args.k_blocks, k_block = unit % args.k_blocks;
  if (block * 64 >= args.sizes.n) {
    return;
  }
  const int word = static_cast<int>(index % 512), thread = word / 4, step = word % 4;
  const int lane = thread % 32;
  const auto* codes = static_cast<const uint8_t*>(args.plain);
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    const int64_t row = block * 64 + thread / 32 * 16 + lane / 4 * 2 + i % 2;
    const int64_t k = k_block * 64 + step * 16 + lane % 4 * 2 + i / 2 * 8;
    const bool there = row < args.sizes.n && k < args.sizes.k;
    const uint32_t two = there ? codes[args.source_row(row) * (args.sizes.k / 2) + k / 2] : 0U;
    packed |= (two & 15U) << (4 * i) | (two >> 4) << (4 * i + 16);
  }
  using Layout = typename Codec::Layout;
  auto* words =
      reinterpret_cast<uint32_t*>(int4_group_pair<Codec>(args, block, k_block) +
                                  thread / 32 * Layout::kSliceBytes + Layout::codes(k_block % 2));
  words[lane * 4 + step] = Codec::place(packed);
}

/// One thread for a byte of canonical codes.
template <typename Codec>
__global__ void unpack_int4_codes(Int4GroupPackArgs args) {
  const int64_t row_bytes = args.sizes.k / 2;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t canonical = index / row_bytes, k = index % row_bytes * 2;
  if (canonical >= args.sizes.n) {
    return;
  }
  using Layout = typename Codec::Layout;
  const int64_t row = args.packed_row(canonical);
  const int lane = static_cast<int>(row % 16 / 2 * 4 + k % 8 / 2);
  const int i = static_cast<int>(row % 2 + k % 16 / 8 * 2);
  const auto* words = reinterpret_cast<const uint32_t*>(
      int4_group_pair<Codec>(args, row / 64, k / 64) + row % 64 / 16 * Layout::kSliceBytes +
      Layout::codes(k / 64 % 2));
  const uint32_t codes = Codec::codes_of(words[lane * 4 + k % 64 / 16]) >> (4 * i);
  static_cast<uint8_t*>(args.plain)[index] =
      static_cast<uint8_t>((codes & 15U) | (codes >> 16 & 15U) << 4);
}

/// Place of the scale of this packed row and group.
template <typename Codec>
__device__ __nv_bfloat16* int4_scale_place(const Int4GroupPackArgs& args,
                                           int64_t row,
                                           int64_t group) {
  constexpr int kGroup = Codec::kGroup;
  using Layout = typename Codec::Layout;
  const int64_t k_block = group * kGroup / 64;
  const int64_t within = kGroup < 64 ? group % (64 / kGroup) : 0;
  return reinterpret_cast<__nv_bfloat16*>(
             int4_group_pair<Codec>(args, row / 64, k_block) + row % 64 / 16 * Layout::kSliceBytes +
             Layout::scales(k_block % 2) + within * Layout::kGroupBytes) +
         row % 16;  // [lane / 4][2]
}

/// One thread for a scale, the zeros of padding included.
template <typename Codec>
__global__ void pack_int4_scales(Int4GroupPackArgs args) {
  const int64_t packed_groups = args.k_blocks * 64 / Codec::kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / packed_groups, group = index % packed_groups;
  if (row >= args.row_blocks * 64) {
    return;
  }
  const int64_t groups = args.sizes.k / Codec::kGroup;
  const bool there = row < args.sizes.n && group < groups;
  const float scale =
      there ? static_cast<const float*>(args.plain)[args.source_row(row) * groups + group] : 0.0F;
  *int4_scale_place<Codec>(args, row, group) = __float2bfloat16_rn(scale);
}

template <typename Codec>
__global__ void unpack_int4_scales(Int4GroupPackArgs args) {
  const int64_t groups = args.sizes.k / Codec::kGroup;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / groups, group = index % groups;
  if (row < args.sizes.n) {
    static_cast<float*>(args.plain)[index] =
        __bfloat162float(*int4_scale_place<Codec>(args, args.packed_row(row), group));
  }
}

/// The kernels above for whole matrices; k is a multiple of the codec's group.
template <typename Codec>
struct Int4GroupPacking {
  static constexpr int kThreads = 256;

  static Int4GroupPackArgs args_of(void* packed, void* plain, const Int4GroupSizes& sizes) {
    return {.packed = packed,
            .plain = plain,
            .sizes = sizes,
            .k_blocks = (sizes.k + 127) / 128 * 2,
            .row_blocks = (sizes.n + 63) / 64};
  }
  static cudaError_t run(void (*kernel)(Int4GroupPackArgs),
                         int64_t threads,
                         const Int4GroupPackArgs& args,
                         cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
    return launch(kernel, {.blocks = dim3(blocks), .threads = kThreads},
                  {.stream = stream, .overlap = false}, args);
  }
  static cudaError_t pack(const void* codes,
                          const Int4GroupSizes& sizes,
                          void* packed,
                          cudaStream_t stream) {
    const Int4GroupPackArgs args = args_of(packed, const_cast<void*>(codes), sizes);
    return run(pack_int4_codes<Codec>, args.row_blocks * args.k_blocks * 512, args, stream);
  }
  static cudaError_t unpack(const void* packed,
                            const Int4GroupSizes& sizes,
                            void* codes,
                            cudaStream_t stream) {
    return run(unpack_int4_codes<Codec>, sizes.n * sizes.k / 2,
               args_of(const_cast<void*>(packed), codes, sizes), stream);
  }
  static cudaError_t pack_scales(const float* scales,
                                 const Int4GroupSizes& sizes,
                                 void* packed,
                                 cudaStream_t stream) {
    const Int4GroupPackArgs args = args_of(packed, const_cast<float*>(scales), sizes);
    return run(pack_int4_scales<Codec>, args.row_blocks * args.k_blocks * 4096 / Codec::kGroup,
               args, stream);
  }
  static cudaError_t unpack_scales(const void* packed,
                                   const Int4GroupSizes& sizes,
                                   float* scales,
                                   cudaStream_t stream) {
    return run(unpack_int4_scales<Codec>, sizes.n * sizes.k / Codec::kGroup,
               args_of(const_cast<void*>(packed), scales, sizes), stream);
  }
};

}  // namespace nibble::cuda
