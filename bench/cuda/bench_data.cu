#include <cuda_bf16.h>

#include "backend/cuda/launch.h"
#include "bench/cuda/bench_data.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocks = 132 * 8;

/// splitmix64 (Steele, Lea, Flood 2014).
__device__ uint64_t random_bits(uint64_t index, uint64_t seed) {
  uint64_t z = (index + seed * 0x632be59bd9b4e019ULL) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

/// Sum of two uniform numbers, in -1..1.
__device__ float triangular(uint64_t bits) {
  return (static_cast<float>(bits & 0xffff) + static_cast<float>((bits >> 16) & 0xffff) -
          65535.0F) /
         65536.0F;
}

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

__global__ void fill_words(uint32_t* out, int64_t words, uint64_t seed) {
  for (int64_t i = thread_index(); i < words; i += thread_count()) {
    out[i] = static_cast<uint32_t>(random_bits(static_cast<uint64_t>(i), seed));
  }
}

__global__ void fill_e4m3(uint8_t* out, int64_t count, uint64_t seed) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const auto bits = static_cast<uint32_t>(random_bits(static_cast<uint64_t>(i), seed));
    out[i] = static_cast<uint8_t>((bits & 0x80U) | (((bits >> 8) % 0x48U) + 0x10U));
  }
}

__global__ void fill_bf16(__nv_bfloat16* out, int64_t count, uint64_t seed) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    out[i] = __float2bfloat16_rn(triangular(random_bits(static_cast<uint64_t>(i), seed)));
  }
}

__global__ void fill_minimums(const float* scales, int64_t count, float* minimums) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    minimums[i] = -8.0F * scales[i];
  }
}

__global__ void fill_scales(float* out, int64_t count, bool powers, uint64_t seed) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const auto bits = static_cast<uint32_t>(random_bits(static_cast<uint64_t>(i), seed) & 0x7fU);
    out[i] = powers ? 0x1p-6F : 0x1p-6F * (1.0F + static_cast<float>(bits) / 128.0F);
  }
}

__device__ float code_value(WeightCode code, const uint8_t* row, int64_t column) {
  switch (code) {
    case WeightCode::kInt8:
      return static_cast<float>(static_cast<int8_t>(row[column]));
    case WeightCode::kFp8E4M3:
      return decode_e4m3(row[column]);
    case WeightCode::kInt4:
      return static_cast<float>((row[column / 2] >> (column % 2 * 4)) & 15) - 8.0F;
    case WeightCode::kFp4E2M1:
      return decode_e2m1(static_cast<uint8_t>(row[column / 2] >> (column % 2 * 4)));
    default:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[column]);
  }
}

__global__ void decode_matrix(DecodeArgs args) {
  const int64_t row = blockIdx.x;
  const auto* codes = static_cast<const uint8_t*>(args.codes) + row * args.row_bytes;
  const int64_t groups = args.format.groups(args.k);
  for (int64_t column = threadIdx.x; column < args.k; column += blockDim.x) {
    const int64_t group = args.format.grouped() ? column / args.format.group_size : 0;
    const float scale = groups == 0 ? 1.0F : args.scales[row * groups + group];
    static_cast<__nv_bfloat16*>(args.out)[row * args.k + column] =
        __float2bfloat16_rn(code_value(args.format.code, codes, column) * scale);
  }
}

__global__ void decode_rows(ActFormat act, const void* x, __nv_bfloat16* out, int64_t count) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const uint8_t byte = static_cast<const uint8_t*>(x)[i];
    out[i] = __float2bfloat16_rn(0x1p-6F * (is_integer(act)
                                                ? static_cast<float>(static_cast<int8_t>(byte))
                                                : decode_e4m3(byte)));
  }
}

__global__ void decode_wide_rows(const DecodeWideArgs args) {
  const IntBlocks& blocks = args.blocks;
  for (int64_t i = thread_index(); i < args.rows * args.k; i += thread_count()) {
    const int64_t row = i / args.k, block = i % args.k / blocks.block;
    const int64_t within = i % args.k % blocks.block;
    const uint8_t* first = static_cast<const uint8_t*>(args.x) + row * blocks.wide.row_bytes() +
                           blocks.wide.places[block];
    auto* out = static_cast<__nv_bfloat16*>(args.out);
    if (blocks.bits[block] == 8) {
      const auto code = static_cast<int8_t>(first[within]);
      out[i] = __float2bfloat16_rn(args.scales[row] * static_cast<float>(code));
    } else {
      out[i] = reinterpret_cast<const __nv_bfloat16*>(first)[within];
    }
  }
}

// Codes of 4 bits from those of 8.
__global__ void narrow_blocks(IntBlocks blocks, int8_t* x, int64_t count, int64_t k) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    if (blocks.bits[i % k / blocks.block] == 4) {
      x[i] = static_cast<int8_t>(x[i] % 8);
    }
  }
}

__global__ void compare(const __nv_bfloat16* a,
                        const __nv_bfloat16* b,
                        int64_t count,
                        double* sums) {
  double difference = 0.0, size = 0.0;
  for (int64_t i = thread_index(); i < count; i += thread_count()) {
    const double x = __bfloat162float(a[i]), y = __bfloat162float(b[i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  atomicAdd(sums, difference);
  atomicAdd(sums + 1, size);
}

__device__ uint64_t nanoseconds() {
  uint64_t time = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__global__ void wait_for(const volatile uint32_t* released) {
  const uint64_t begin = nanoseconds();
  while (*released == 0 && nanoseconds() - begin < 1000000000) {
  }
}

unsigned blocks_for(size_t count) {
  const size_t needed = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(needed < kBlocks ? needed : kBlocks);
}

/// Every kernel here runs after its predecessor has ended.
template <typename... Parameters, typename... Arguments>
cudaError_t run(void (*kernel)(Parameters...),
                size_t count,
                cudaStream_t stream,
                Arguments... args) {
  return launch(kernel, {.blocks = dim3(blocks_for(count)), .threads = kThreads},
                {.stream = stream, .overlap = false}, args...);
}

}  // namespace

cudaError_t random_codes(
    WeightCode code, void* codes, size_t bytes, uint64_t seed, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(bytes);
  if (code == WeightCode::kBf16) {
    return run(fill_bf16, bytes / 2, stream, static_cast<__nv_bfloat16*>(codes), count / 2, seed);
  }
  if (code == WeightCode::kFp8E4M3) {
    return run(fill_e4m3, bytes, stream, static_cast<uint8_t*>(codes), count, seed);
  }
  return run(fill_words, bytes / 4, stream, static_cast<uint32_t*>(codes), count / 4, seed);
}

cudaError_t random_scales(
    float* scales, size_t count, bool powers, uint64_t seed, cudaStream_t stream) {
  return run(fill_scales, count, stream, scales, static_cast<int64_t>(count), powers, seed);
}

cudaError_t matching_minimums(const float* scales,
                              size_t count,
                              float* minimums,
                              cudaStream_t stream) {
  return run(fill_minimums, count, stream, scales, static_cast<int64_t>(count), minimums);
}

cudaError_t random_activations(
    ActFormat act, void* x, size_t count, uint64_t seed, cudaStream_t stream) {
  if (act == ActFormat::kInt8Token) {
    return random_codes(WeightCode::kInt8, x, count, seed, stream);
  }
  if (act == ActFormat::kFp8Token || act == ActFormat::kFp8Group) {
    return random_codes(WeightCode::kFp8E4M3, x, count, seed, stream);
  }
  return random_codes(WeightCode::kBf16, x, count * 2, seed, stream);
}

cudaError_t random_block_activations(
    const IntBlocks& blocks, void* x, int64_t rows, int64_t k, cudaStream_t stream) {
  const int64_t count = rows * k;
  const cudaError_t error =
      random_codes(WeightCode::kInt8, x, static_cast<size_t>(count), 3, stream);
  return error != cudaSuccess ? error
                              : run(narrow_blocks, static_cast<size_t>(count), stream, blocks,
                                    static_cast<int8_t*>(x), count, k);
}

cudaError_t decode_wide_activations(const DecodeWideArgs& args, cudaStream_t stream) {
  return run(decode_wide_rows, static_cast<size_t>(args.rows * args.k), stream, args);
}

cudaError_t decode_to_bf16(const DecodeArgs& args, cudaStream_t stream) {
  return launch(decode_matrix, {.blocks = dim3(static_cast<unsigned>(args.n)), .threads = kThreads},
                {.stream = stream, .overlap = false}, args);
}

cudaError_t decode_activations(
    ActFormat act, const void* x, void* out, size_t count, cudaStream_t stream) {
  if (act == ActFormat::kBf16) {
    return cudaMemcpyAsync(out, x, count * 2, cudaMemcpyDeviceToDevice, stream);
  }
  return run(decode_rows, count, stream, act, x, static_cast<__nv_bfloat16*>(out),
             static_cast<int64_t>(count));
}

cudaError_t compare_bf16(
    const void* a, const void* b, size_t count, double* sums, cudaStream_t stream) {
  return run(compare, count, stream, static_cast<const __nv_bfloat16*>(a),
             static_cast<const __nv_bfloat16*>(b), static_cast<int64_t>(count), sums);
}

cudaError_t hold(const uint32_t* released, cudaStream_t stream) {
  return launch(wait_for, {.blocks = dim3(1), .threads = 1}, {.stream = stream, .overlap = false},
                released);
}

}  // namespace nibble::cuda
