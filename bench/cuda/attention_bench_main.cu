// Speed of attention: decode over random caches that do not fit into the L2 cache, as a chain of
// launches in a CUDA graph, of few and many sequences and, as short, of many short ones; prefill of
// one long sequence. Usage: attention_bench [decode|short|prefill].

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/attention.h"
#include "base/check.h"
#include "bench/cuda/bench_timer.h"

namespace nibble::cuda {
namespace {

constexpr double kReadCeiling = 4.60e12;  // bytes/s, measured on an H200 (docs/kernels.md)
constexpr int kHeads = 32;
constexpr int kKvHeads = 8;
constexpr int kDim = 128;

void expect(cudaError_t error, const char* what) {
  CHECK_MSG(error == cudaSuccess, "{}: {}", what, cudaGetErrorString(error));
}

template <typename T>
T* allocate(size_t count) {
  void* memory = nullptr;
  expect(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  expect(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

template <typename T>
T* upload(const std::vector<T>& values) {
  T* memory = allocate<T>(values.size());
  expect(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
         "upload");
  return memory;
}

__device__ uint32_t mix(uint64_t i) {
  uint64_t x = i * 0x9e3779b97f4a7c15ULL;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ULL;
  return static_cast<uint32_t>(x >> 32);
}

/// Random elements of moderate size, 16 bits at a time; parameters of integer codes near 0.01.
__global__ void fill_kernel(uint16_t* out, size_t count, KvCode code, int tile, int rows) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint32_t random = mix(i);
    uint32_t bits = random & 0xffffU;
    if (code == KvCode::kBf16) {
      bits = (random & 0x807fU) | (0x3e80U + (random >> 16 & 0x100U));
    } else if (code == KvCode::kFp8) {
      bits &= 0xbfbfU;
    } else if (static_cast<int>(i * 2 % static_cast<size_t>(tile)) >= rows) {
      bits = 0x2000U | (random & 0x3ffU);
    }
    out[i] = static_cast<uint16_t>(bits);
  }
}

struct Format {
  KvCode code;
  const char* name;
  AttentionForm form = AttentionForm::kOwn;
};
constexpr Format kFormats[] = {{KvCode::kBf16, "bf16"},
                               {KvCode::kBf16, "shared", AttentionForm::kShared},
                               {KvCode::kFp8, "fp8"},
                               {KvCode::kInt8, "int8"},
                               {KvCode::kInt4, "int4"},
                               {KvCode::kInt4Page, "int4_page"},
                               {KvCode::kInt4Static, "int4_static"}};

struct Sizes {
  int sequences = 1;
  int rows = 1;  // of each in the step
  int tokens = 1;
  int kv_heads = kKvHeads;
};

struct Problem {
  AttentionShape shape;
  StepMetadata step;
  int layers = 0;
  uint8_t* pages = nullptr;
  size_t layer_bytes = 0;
  uint16_t* residual = nullptr;
  size_t layer_residual = 0;  // numbers
  uint16_t* qkv = nullptr;
  uint16_t* out = nullptr;
  void* plan = nullptr;
  void* workspace = nullptr;
  float* inv_freq = nullptr;
};

Problem make_problem(const Format& format, const Sizes& sizes) {
  const auto [sequences, q_len, kv_len, kv_heads] = sizes;
  const KvCode code = format.code;
  Problem p;
  p.shape.form = format.form;
  p.shape.kv = {code, preferred_page_size(code), kv_heads, kDim};
  p.shape.heads = kHeads;
  p.shape.scale = 0.088388F;
  const int page_size = p.shape.kv.page_size;
  const int per_sequence = (kv_len + page_size - 1) / page_size;
  std::vector<int32_t> table(static_cast<size_t>(sequences * per_sequence));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  std::vector<int32_t> begin(static_cast<size_t>(sequences + 1));
  std::vector<int32_t> position;
  std::vector<int32_t> owner;
  for (int s = 0; s < sequences; ++s) {
    begin[static_cast<size_t>(s) + 1] = (s + 1) * q_len;
    for (int i = 0; i < q_len; ++i) {
      position.push_back(kv_len - q_len + i);
      owner.push_back(s);
    }
  }
  p.step.q_begin = upload(begin);
  p.step.kv_len = upload(std::vector<int32_t>(static_cast<size_t>(sequences), kv_len));
  p.step.page_table = upload(table);
  p.step.page_table_stride = per_sequence;
  p.step.row_position = upload(position);
  p.step.row_sequence = upload(owner);
  p.step.sequences = sequences;
  p.step.rows = sequences * q_len;
  p.layer_bytes = table.size() * static_cast<size_t>(page_bytes(p.shape.kv));
  p.layers = static_cast<int>(std::clamp<size_t>((size_t{400} << 20) / p.layer_bytes, 1, 16));
  p.pages = allocate<uint8_t>(p.layer_bytes * static_cast<size_t>(p.layers));
  fill_kernel<<<1024, 256>>>(reinterpret_cast<uint16_t*>(p.pages),
                             p.layer_bytes * static_cast<size_t>(p.layers) / 2, code,
                             kv_tile_bytes(code, kDim), 2 * kv_tile_rows_bytes(code, kDim));
  if (kv_has_residual(code)) {
    p.layer_residual = table.size() * static_cast<size_t>(page_size * kv_heads * kDim);
    const size_t count = p.layer_residual * static_cast<size_t>(p.layers);
    p.residual = allocate<uint16_t>(count);
    fill_kernel<<<1024, 256>>>(p.residual, count, KvCode::kBf16, 1, 1);
  }
  const size_t rows = static_cast<size_t>(p.step.rows);
  const size_t width = static_cast<size_t>(kHeads + 2 * kv_heads) * kDim;
  p.qkv = allocate<uint16_t>(rows * width);
  fill_kernel<<<256, 256>>>(p.qkv, rows * width, KvCode::kBf16, 1, 1);
  p.out = allocate<uint16_t>(rows * kHeads * kDim);
  p.plan = allocate<uint8_t>(attention_plan_bytes(p.shape, sequences, p.step.rows));
  p.workspace = allocate<uint8_t>(attention_workspace_bytes(p.shape));
  p.inv_freq = upload(std::vector<float>(kDim / 2, 0.01F));
  expect(plan_attention(p.shape, p.step, p.plan, {nullptr, false}), "plan");
  expect(cudaDeviceSynchronize(), "set-up");
  return p;
}

void release(const Problem& p) {
  const void* const all[] = {p.step.q_begin,
                             p.step.kv_len,
                             p.step.page_table,
                             p.pages,
                             p.residual,
                             p.step.row_position,
                             p.step.row_sequence,
                             p.qkv,
                             p.out,
                             p.plan,
                             p.workspace,
                             p.inv_freq};
  for (const void* memory : all) {
    cudaFree(const_cast<void*>(memory));
  }
}

void run_layer(const Problem& p, int layer, bool append, bool prefill, const LaunchContext& on) {
  uint8_t* pages = p.pages + static_cast<size_t>(layer % p.layers) * p.layer_bytes;
  const ResidualKeys residual{
      p.residual == nullptr ? nullptr
                            : p.residual + static_cast<size_t>(layer % p.layers) * p.layer_residual,
      p.step.page_table};
  const int64_t stride = (kHeads + 2 * p.shape.kv.kv_heads) * kDim;
  if (append) {
    RopeAppendLaunch args;
    args.shape = p.shape;
    args.step = p.step;
    args.pages = pages;
    args.residual = residual;
    args.qkv = p.qkv;
    args.qkv_stride = stride;
    args.inv_freq = p.inv_freq;
    args.basis = basis_of(p.shape.kv.code);
    expect(rope_append(args, on), "append");
  }
  AttentionLaunch args;
  args.shape = p.shape;
  args.step = p.step;
  args.plan = p.plan;
  args.pages = pages;
  args.residual = residual;
  args.q = p.qkv;
  args.q_stride = stride;
  args.out = p.out;
  args.out_stride = kHeads * kDim;
  args.workspace = p.workspace;
  expect(prefill ? prefill_attention(args, on) : decode_attention(args, on), "attention");
}

/// Median microseconds of one launch (or append and launch) in a graph of `launches`.
double time_graph(const Problem& p, int launches, bool append, bool prefill) {
  const auto timer = Timer::make().value();
  const Recording layers = timer
                               ->record([&] {
                                 for (int i = 0; i < launches; ++i) {
                                   run_layer(p, i, append, prefill, {timer->stream(), true});
                                 }
                                 return Status();
                               })
                               .value();
  std::vector<double> times;
  for (int i = 0; i < 8; ++i) {
    times.push_back(timer->replay(layers).value());
  }
  times.erase(times.begin());
  return median(times) / launches;
}

void bench_decode(const std::vector<Sizes>& cases) {
  std::printf("decode, %d query heads x %d\n", kHeads, kDim);
  std::printf("%-11s %5s %7s %5s %9s %7s %6s %8s %12s\n", "kv", "batch", "length", "heads", "us",
              "TB/s", "%", "vs bf16", "with append");
  for (const Sizes& sizes : cases) {
    double bf16 = 0.0;
    for (const Format& format : kFormats) {
      const Problem p = make_problem(format, sizes);
      const double us = time_graph(p, 24, false, false);
      const double with_append = time_graph(p, 24, true, false);
      const double bytes = static_cast<double>(sizes.sequences) * sizes.tokens * sizes.kv_heads *
                           kv_tile_bytes(format.code, kDim) / kv_tile_tokens(format.code);
      bf16 = bf16 == 0.0 ? us : bf16;
      std::printf("%-11s %5d %7d %5d %9.2f %7.3f %5.1f%% %8.2f %12.2f\n", format.name,
                  sizes.sequences, sizes.tokens, sizes.kv_heads, us, bytes / us * 1e-6,
                  bytes / us * 1e8 / kReadCeiling, bf16 / us, with_append);
      release(p);
    }
  }
}

void bench_prefill() {
  constexpr int kShapes[][3] = {
      {1, 8192, 8192}, {8, 1024, 1024}, {16, 512, 512}, {64, 128, 128}, {1, 2048, 16384}};
  std::printf("prefill\n%-11s %5s %7s %7s %9s %7s %10s\n", "kv", "batch", "rows", "length", "us",
              "TFLOPS", "append us");
  for (const auto& [batch, rows, length] : kShapes) {
    for (const Format& format : kFormats) {
      const Problem p = make_problem(format, {batch, rows, length});
      const double us = time_graph(p, 3, false, true);
      const double both = time_graph(p, 3, true, true);
      const double pairs = static_cast<double>(rows) * length - 0.5 * rows * (rows - 1.0);
      const double flops = 4.0 * kDim * kHeads * pairs * batch;
      std::printf("%-11s %5d %7d %7d %9.1f %7.1f %10.1f\n", format.name, batch, rows, length, us,
                  flops / us * 1e-6, both - us);
      release(p);
    }
  }
}

}  // namespace
}  // namespace nibble::cuda

int main(int count, char** arguments) {
  const std::string which = count > 1 ? arguments[1] : "";
  // Of int4_page, groups of keys fill in all sequences whose length is a multiple of
  // kChannelTokens.
  if (which.empty() || which == "decode") {
    nibble::cuda::bench_decode({{1, 1, 1024},
                                {32, 1, 4096},
                                {64, 1, 8192},
                                {1, 1, 131072},
                                {1, 1, 8192},
                                {8, 1, 4096},
                                {32, 1, 4097},
                                {64, 1, 8193}});
  }
  if (which.empty() || which == "short") {
    nibble::cuda::bench_decode({{1024, 1, 192},
                                {256, 1, 192},
                                {256, 1, 512},
                                {256, 1, 1000},
                                {512, 1, 192, 32},
                                {128, 1, 500, 32}});
  }
  if (which.empty() || which == "prefill") {
    nibble::cuda::bench_prefill();
  }
  return 0;
}
