// Sampling of tokens, part one: edits of the logits, the likeliest token of every row, and what
// draws need to know of a row. A row is spread over blocks: their best keys meet in an atomic
// maximum, and their histograms in atomic sums of integers, so that the order does not matter.

#include "backend/cuda/kernels/sampling/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8192;  // logits per block: 64 rows of 128256 make 1024 blocks
constexpr int64_t kMaxRows = 65535;

__global__ __launch_bounds__(kThreads) void edit_kernel(const SampleArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.max_edits || i >= args.edit_count[0]) {
    return;
  }
  const LogitEdit edit = args.edits[i];
  if (edit.row < 0 || edit.row >= args.rows || edit.token < 0 || edit.token >= args.vocab) {
    return;
  }
  float& logit = args.logits[edit.row * args.stride + edit.token];
  const float before = logit;
  sample_workspace(args).replaced[i] = before;
  if (!is_finite(before)) {
    return;  // stays, to be reported
  }
  if (edit.bias == -__uint_as_float(kInfinity)) {
    logit = __uint_as_float(kBanned);
    return;
  }
  const float biased = before + edit.bias;
  const float scaled = biased > 0 ? biased / edit.repetition : __fmul_rn(biased, edit.repetition);
  logit = __fsub_rn(scaled, edit.penalty);  // not fused with the product: as on the CPU
}

/// Bans what the masks of rows forbid. What is not finite stays, to be reported.
__global__ __launch_bounds__(kThreads) void mask_kernel(const SampleArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.y;
  const int64_t number = args.mask_of[row];
  if (number < 0) {
    return;
  }
  const uint32_t* mask = args.masks + number * ((args.vocab + 31) / 32);
  float* logits = args.logits + row * args.stride;
  const int64_t first = int64_t{blockIdx.x} * kChunk;
  const int64_t end = min(first + kChunk, args.vocab);
  for (int64_t token = first + threadIdx.x; token < end; token += kThreads) {
    const bool allowed = ((mask[token / 32] >> (token % 32)) & 1U) != 0;
    if (!allowed && is_finite(logits[token])) {
      logits[token] = __uint_as_float(kBanned);
    }
  }
}

__global__ __launch_bounds__(kThreads) void argmax_kernel(const SampleArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.y;
  const int64_t first = int64_t{blockIdx.x} * kChunk;
  const int64_t end = min(first + kChunk, args.vocab);
  Key best = 0;
  float largest = -__uint_as_float(kInfinity);
  int32_t token = -1;
  bool bad = false;
  for_each_logit(args.logits + row * args.stride, first, end, static_cast<int>(threadIdx.x),
                 kThreads, [&](float logit, int32_t id) {
                   bad |= !is_finite(logit) && __float_as_uint(logit) != kBanned;
                   if (logit > largest) {  // false for the NaN of a banned one
                     largest = logit;
                     token = id;
                   }
                 });
  if (token >= 0) {
    best = sample_key(largest, token);
  }
  __shared__ Key shared[32];
  best = max_block(best, shared);
  const int any_bad = __syncthreads_or(bad ? 1 : 0);
  if (threadIdx.x == 0) {
    const SampleWorkspace workspace = sample_workspace(args);
    atomicMax(workspace.best + row, best);
    if (any_bad != 0) {
      atomicOr(workspace.not_finite + row, 1U);
    }
  }
}

/// The weights of pieces of the rows that draw, and the histograms of those that rank.
__global__ __launch_bounds__(kThreads) void weigh_kernel(const SampleArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  __shared__ Histogram histogram;
  __shared__ Weight sums[32];
  const int64_t number = blockIdx.y;
  const SampleWorkspace workspace = sample_workspace(args);
  const RowSampling sampling = args.sampling[number];
  const Key best = workspace.best[number];
  if (!(sampling.inverse_temperature > 0) || best == 0 || workspace.not_finite[number] != 0) {
    return;
  }
  const Row row{args.logits + number * args.stride, args.vocab, key_logit(best),
                sampling.inverse_temperature};
  const bool ranked = is_ranked(sampling);
  const bool weighed = sampling.top_p < 1;  // top-k alone needs numbers only
  if (ranked) {
    clear(histogram);
  }
  const int64_t first = int64_t{blockIdx.x} * kPieceTokens;
  Weight sum = 0;
  for_each_logit(row.logits, first, min(first + kPieceTokens, args.vocab),
                 static_cast<int>(threadIdx.x), kThreads, [&](float logit, int32_t) {
                   const float w = row.weight(logit);
                   sum += w >= sampling.min_p ? fixed(w) : 0;
                   if (weighed && w > 0) {
                     count_token(histogram, bin_of(row.place(logit)), fixed(w));
                   } else if (ranked && w > 0) {
                     atomicAdd(histogram.counts + bin_of(row.place(logit)), 1U);
                   }
                 });
  sum = sum_block(sum, sums);  // and a barrier
  if (threadIdx.x == 0) {
    workspace.pieces[number * kMaxPieces + blockIdx.x] = sum;
  }
  for (int i = static_cast<int>(threadIdx.x); ranked && i < kBins; i += kThreads) {
    if (histogram.counts[i] > 0) {
      atomicAdd(workspace.counts + number * kBins + i, histogram.counts[i]);
      if (weighed) {
        atomicAdd(workspace.weights + number * kBins + i,
                  (static_cast<Weight>(histogram.high[i]) << 32) + histogram.low[i]);
      }
    }
  }
}

}  // namespace

size_t sample_workspace_bytes(int64_t max_rows, int64_t max_edits) {
  constexpr int64_t kRowBytes = 8 + 8 * kBins + 8 * kMaxPieces + 8 + 4 * kBins + 4;
  return static_cast<size_t>(max_rows * kRowBytes + max_edits * 4);
}

cudaError_t sample_tokens(const SampleArgs& args, const LaunchContext& context) {
  if (args.rows < 0 || args.rows > kMaxRows || args.rows > args.max_rows || args.vocab < 1 ||
      args.vocab > kMaxVocab || args.stride < args.vocab || args.max_edits < 0 ||
      (args.logprobs == nullptr) != (args.top == nullptr) ||
      (args.mask_of == nullptr) != (args.masks == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  cudaError_t error = cudaSuccess;
  if (args.logprobs != nullptr) {
    error = launch_top_logprobs(args, context);
  }
  if (error == cudaSuccess && args.edits != nullptr && args.max_edits > 0) {
    const auto blocks = static_cast<unsigned>((args.max_edits + kThreads - 1) / kThreads);
    error = launch(edit_kernel, {.blocks = dim3(blocks), .threads = kThreads}, context, args);
  }
  const dim3 chunks(static_cast<unsigned>((args.vocab + kChunk - 1) / kChunk),
                    static_cast<unsigned>(args.rows));
  if (error == cudaSuccess && args.mask_of != nullptr) {
    error = launch(mask_kernel, {.blocks = chunks, .threads = kThreads}, context, args);
  }
  if (error == cudaSuccess) {
    error = launch(argmax_kernel, {.blocks = chunks, .threads = kThreads}, context, args);
  }
  if (error == cudaSuccess && args.range == SampleRange::kAny) {
    const dim3 blocks(static_cast<unsigned>((args.vocab + kPieceTokens - 1) / kPieceTokens),
                      static_cast<unsigned>(args.rows));
    error = launch(weigh_kernel, {.blocks = blocks, .threads = kThreads}, context, args);
  }
  return error == cudaSuccess ? launch_draw(args, context) : error;
}

}  // namespace nibble::cuda
