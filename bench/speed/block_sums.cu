// What it takes to add the sums of every block of 128 products of INT8 to a tile's, beside wgmma: a
// loop of nothing else, clocks of a block on one multiprocessor.
//   nvcc -O2 -std=c++20 -Isrc -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
//        -o block_sums bench/speed/block_sums.cu && ./block_sums

#include <cstdio>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/ptx/wgmma_fresh.cuh"

namespace nibble::cuda {
namespace {

// What is done with a sum: fused additions, and which work of the block form beside them.
enum class Work : uint8_t { kOne, kTwo, kThree, kOneAndLoads, kAll };
constexpr const char* kNames[] = {"one fused addition", "two", "three", "one, and loads of scales",
                                  "conversion, both scales, addition"};
constexpr int kHalf = 64;  // tokens
constexpr int kSteps = 2000;
constexpr int kSharedBytes = 200 * 1024;

/// A warpgroup's 64 rows of 128 tokens, in halves as the product has them.
template <Work kWork>
struct Sums {
  int32_t sums[2][kHalf / 2];
  float total[kHalf];
  float2 weights;

  __device__ __forceinline__ void start(int h, const uint32_t (&a)[4][4], uint32_t x) {
    const uint32_t from = x + h * (kHalf * 8);
    ptx::mma_fence();
    ptx::mma_fresh_s8<kHalf>(sums[h], a[0], ptx::with_swizzle(from));
#pragma unroll
    for (int k = 1; k < 4; ++k) {
      ptx::mma_registers<ptx::MmaType::kInt8, kHalf>(sums[h], a[k],
                                                     ptx::with_swizzle(from + 2 * k));
    }
    ptx::mma_commit();
  }
  template <int kPending>
  __device__ __forceinline__ void add(int h, uint32_t scales) {
    constexpr bool kLoads = kWork == Work::kOneAndLoads || kWork == Work::kAll;
    ptx::mma_wait<kPending>();
    ptx::pin(sums[h]);
#pragma unroll
    for (int octet = 0; octet < kHalf / 8; ++octet) {
      float2 x = weights;
      if constexpr (kLoads) {
        asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(x.x), "=f"(x.y)
                     : "r"(scales + h * kHalf * 4 + 32 * octet + 8 * (threadIdx.x & 3)));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t sum = sums[h][4 * octet + i];
        const float bits = __int_as_float(sum), w = i < 2 ? weights.x : weights.y;
        float& to = total[h * (kHalf / 2) + 4 * octet + i];
        if constexpr (kWork == Work::kAll) {
          to = __fmaf_rn(static_cast<float>(sum), __fmul_rn(i % 2 == 0 ? x.x : x.y, w), to);
          continue;
        }
        to = __fmaf_rn(bits, w, to);
        if constexpr (kWork == Work::kTwo || kWork == Work::kThree) {
          to = __fmaf_rn(bits, weights.x, to);
        }
        if constexpr (kWork == Work::kThree) {
          to = __fmaf_rn(bits, weights.y, to);
        }
      }
    }
    ptx::pin(total);
  }
};

template <Work kWork>
__global__ void __launch_bounds__(256, 1) block_sums(float* out, long long* clocks) {
  extern __shared__ uint32_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 1023U) & ~1023U;
  for (unsigned i = threadIdx.x; i < 48 * 1024; i += blockDim.x) {
    shared[i] = i * 2654435761U;
  }
  Sums<kWork> work = {};
  work.weights = {out[threadIdx.x], out[threadIdx.x + 1]};
  uint32_t a[4][4];
  for (int i = 0; i < 16; ++i) {
    a[i / 4][i % 4] = threadIdx.x * 0x9e3779b9U * (i + 1);
  }
  const uint32_t x = ptx::descriptor_address(base);
  const uint32_t scales = base + 65536;
  __syncthreads();
  const long long begin = clock64();
  for (int step = 0; step < kSteps; ++step) {
    work.start(0, a, x);
    work.start(1, a, x);
#pragma unroll
    for (int u = 0; u < 3; ++u) {
      work.template add<1>(0, scales);
      work.start(0, a, x);
      work.template add<1>(1, scales);
      work.start(1, a, x);
    }
    work.template add<1>(0, scales);
    work.template add<0>(1, scales);
  }
  const long long end = clock64();
  float all = 0.0F;
  for (const float total : work.total) {
    all += total;
  }
  out[threadIdx.x] = all;
  if (threadIdx.x == 0) {
    *clocks = end - begin;
  }
}

template <Work kWork>
void measure(float* out, long long* clocks) {
  cudaFuncSetAttribute(block_sums<kWork>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       kSharedBytes);
  long long taken = 0;
  for (int turn = 0; turn < 2; ++turn) {
    cudaMemset(out, 0, 1024 * sizeof(float));
    block_sums<kWork><<<132, 256, kSharedBytes>>>(out, clocks);
    cudaMemcpy(&taken, clocks, sizeof(taken), cudaMemcpyDeviceToHost);
  }
  std::printf("%-34s %6.1f clocks, of which products take 512 (%s)\n",
              kNames[static_cast<int>(kWork)], static_cast<double>(taken) / (4.0 * kSteps),
              cudaGetErrorString(cudaGetLastError()));
}

}  // namespace
}  // namespace nibble::cuda

int main() {
  using namespace nibble::cuda;
  float* out = nullptr;
  long long* clocks = nullptr;
  cudaMalloc(&out, 1024 * sizeof(float));
  cudaMalloc(&clocks, sizeof(*clocks));
  measure<Work::kOne>(out, clocks);
  measure<Work::kTwo>(out, clocks);
  measure<Work::kThree>(out, clocks);
  measure<Work::kOneAndLoads>(out, clocks);
  measure<Work::kAll>(out, clocks);
  return 0;
}
