// Sampling of tokens, part two: one block per row draws from the distribution that temperature,
// top-k, top-p and min-p leave, or takes the likeliest token.
//
// Weights exp((logit - largest) / temperature) are counted as integers, in steps of 2^-44, so that
// sums are exact and do not depend on their order. Without top-k and top-p the draw walks the
// tokens in their order, by the sums of pieces of the row. With them it walks the most likely ones
// first: the histogram over equal steps of the exponent says how deep the kept tokens reach, these
// are collected and sorted in shared memory, and sums along the list give every boundary. Where
// they do not fit (a flat distribution) each boundary is found by itself, in a histogram of one bin
// of the histogram, of which a list is sorted; where thousands of logits are equal, by bisection
// over the keys.

#include "backend/cuda/kernels/sampling/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
static_assert(kBins == 2 * kThreads);
constexpr int kListSize = 4096;
constexpr int kRun = kListSize / kThreads;  // elements of the list per thread

struct DrawShared {
  union {
    Histogram histogram;
    Key list[kListSize];  // likeliest first once sorted
  };
  Weight sums[kWarps];
  Key keys[kWarps];
  uint32_t counts[kWarps];
  uint32_t list_count;
  int bin;
  uint32_t bin_count;     // tokens of the bin
  uint32_t count_before;  // those of the bins before it
  Weight weight_before;
  Key key;
  int32_t token;
};

/// The draw samples the first token up to which the weights sum to more than this.
__device__ Weight draw_target(const RowSampling& sampling, Weight total) {
  const double target = draw_uniform(sampling.seed, sampling.step) * static_cast<double>(total);
  const auto rounded = static_cast<Weight>(target);
  return rounded < total ? rounded : total - 1;
}

/// Sum of `value` over this thread and those before it.
template <typename T>
__device__ T scan_block(T value, T* shared) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kEveryLane, value, offset);
    value += threadIdx.x % 32 >= static_cast<unsigned>(offset) ? other : T{0};
  }
  if (threadIdx.x % 32 == 31) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  const T below = threadIdx.x % 32 < threadIdx.x / 32 ? shared[threadIdx.x % 32] : T{0};
  T before = below;
  for (int offset = 16; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(kEveryLane, before, offset);
  }
  __syncthreads();
  return before + value;
}

// ---- draws in the order of the tokens ---------------------------------------------------------

/// Draws by the sums of the row's pieces.
__device__ void draw_in_order(const Row& row,
                              const RowSampling& sampling,
                              const Weight* pieces,
                              DrawShared& shared) {
  const auto thread = static_cast<int64_t>(threadIdx.x);
  const Weight own = thread * kPieceTokens < row.vocab ? pieces[thread] : 0;
  const Weight up_to = scan_block(own, shared.sums);
  const Weight target = draw_target(sampling, max_block(up_to, shared.sums));
  if (up_to > target && up_to - own <= target) {
    shared.bin = static_cast<int>(thread);
    shared.weight_before = up_to - own;
  }
  __syncthreads();
  constexpr int kEach = kPieceTokens / kThreads;
  const int64_t first = int64_t{shared.bin} * kPieceTokens + thread * kEach;
  Weight steps[kEach];
  Weight sum = 0;
  for (int j = 0; j < kEach; ++j) {
    const float w = first + j < row.vocab ? row.weight(row.logits[first + j]) : 0.0F;
    steps[j] = w >= sampling.min_p ? fixed(w) : 0;
    sum += steps[j];
  }
  Weight passed = shared.weight_before + scan_block(sum, shared.sums) - sum;
  for (int j = 0; j < kEach; ++j) {
    if (passed <= target && passed + steps[j] > target) {
      shared.token = static_cast<int32_t>(first) + j;
    }
    passed += steps[j];
  }
  __syncthreads();
}

// ---- draws by likelihood, in a list -----------------------------------------------------------

/// Finds the first bin up to which enough(count, weight) holds, the last bin if there is none, and
/// what stands before it. `count` and `weight` stand before the histogram, which is not needed any
/// more afterwards; the list is empty.
template <typename Enough>
__device__ void find_bin(uint32_t count, Weight weight, const Enough& enough, DrawShared& shared) {
  const unsigned i = 2 * threadIdx.x;
  uint32_t counts[2];
  Weight weights[2];
  for (int j = 0; j < 2; ++j) {
    counts[j] = shared.histogram.counts[i + j];
    weights[j] =
        (static_cast<Weight>(shared.histogram.high[i + j]) << 32) + shared.histogram.low[i + j];
  }
  count += scan_block(counts[0] + counts[1], shared.counts) - counts[0] - counts[1];
  weight += scan_block(weights[0] + weights[1], shared.sums) - weights[0] - weights[1];
  if (threadIdx.x == 0) {
    shared.list_count = 0;
    shared.bin = kBins - 1;
  }
  __syncthreads();
  for (int j = 0; j < 2; ++j) {
    if (!enough(count, weight) && enough(count + counts[j], weight + weights[j])) {
      shared.bin = static_cast<int>(i) + j;
    }
    count += counts[j];
    weight += weights[j];
  }
  __syncthreads();
  for (int j = 1; j >= 0; --j) {
    count -= counts[j];
    weight -= weights[j];
    if (shared.bin == static_cast<int>(i) + j) {
      shared.bin_count = counts[j];
      shared.count_before = count;
      shared.weight_before = weight;
    }
  }
  __syncthreads();
}

/// Sorts the list, descending. Its size is a power of two.
__device__ void sort_list(Key* list, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int gap = run / 2; gap > 0; gap /= 2) {
      for (int t = static_cast<int>(threadIdx.x); t < size / 2; t += kThreads) {
        const int low = t / gap * gap * 2 + t % gap;
        const Key a = list[low];
        const Key b = list[low + gap];
        if ((a < b) == ((low & run) == 0)) {
          list[low] = b;
          list[low + gap] = a;
        }
      }
      __syncthreads();
    }
  }
}

/// Fills the list with the tokens whose places are wanted, which must fit, and sorts it. Returns
/// their number.
template <typename Wanted>
__device__ int collect(const Row& row, const Wanted& wanted, DrawShared& shared) {
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t token) {
                   if (wanted(row.place(logit)) && row.weight(logit) > 0) {
                     shared.list[atomicAdd(&shared.list_count, 1U)] = sample_key(logit, token);
                   }
                 });
  __syncthreads();
  const auto count = static_cast<int>(shared.list_count);
  int size = 2;
  while (size < count) {
    size *= 2;
  }
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    shared.list[i] = 0;
  }
  __syncthreads();
  sort_list(shared.list, size);
  return count;
}

/// Draws from the tokens of the bins up to `bin`.
///   total: weight of the row, for a top-p without top-k
__device__ void draw_from_list(
    const Row& row, const RowSampling& sampling, int bin, Weight total, DrawShared& shared) {
  const int count = collect(
      row, [&](float place) { return bin_of(place) <= bin; }, shared);

  // Each thread sums a run of the list; passed[j] is the weight up to and with its element j.
  const int first = static_cast<int>(threadIdx.x) * kRun;
  int kept = sampling.top_k > 0 ? min(sampling.top_k, count) : count;
  float weights[kRun];
  Weight passed[kRun];
  Weight sum = 0;
  for (int j = 0; j < kRun; ++j) {
    weights[j] = first + j < kept ? row.weight(key_logit(shared.list[first + j])) : 0.0F;
    sum += fixed(weights[j]);
    passed[j] = sum;
  }
  const Weight before = scan_block(sum, shared.sums) - sum;
  for (Weight& p : passed) {
    p += before;
  }
  if (sampling.top_p < 1) {
    if (sampling.top_k > 0) {
      total = max_block(passed[kRun - 1], shared.sums);
    }
    const double part = sampling.top_p * static_cast<double>(total);
    uint32_t missing = 0;  // elements whose sum does not reach the part: all of them are kept
    for (int j = 0; j < kRun; ++j) {
      missing += first + j < kept && static_cast<double>(passed[j]) < part;
    }
    kept = min(kept, static_cast<int>(sum_block(missing, shared.counts)) + 1);
  }
  Weight left = 0;
  for (int j = 0; j < kRun; ++j) {
    if (first + j < kept && weights[j] >= sampling.min_p) {
      left = passed[j];
    }
  }
  const Weight target = draw_target(sampling, max_block(left, shared.sums));
  for (int j = 0; j < kRun; ++j) {
    if (first + j < kept && passed[j] > target && passed[j] - fixed(weights[j]) <= target) {
      shared.token = key_token(shared.list[first + j]);
    }
  }
  __syncthreads();
}

// ---- draws by likelihood, boundary by boundary ------------------------------------------------

struct Measure {
  uint32_t count;
  Weight weight;
};

/// Tokens with keys of at least `least` and weights of at least min_p.
__device__ Measure measure(const Row& row, Key least, float min_p, DrawShared& shared) {
  uint32_t count = 0;
  Weight weight = 0;
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t token) {
                   const float w = row.weight(logit);
                   if (w > 0 && w >= min_p && sample_key(logit, token) >= least) {
                     ++count;
                     weight += fixed(w);
                   }
                 });
  return {sum_block(count, shared.counts), sum_block(weight, shared.sums)};
}

/// As find_key(), for any distribution: a pass over the row for each bit of the answer.
template <typename Enough>
__device__ Key bisect(const Row& row, const Enough& enough, DrawShared& shared) {
  Key low = 0;  // enough
  Key high = sample_key(row.largest, 0) + 1;
  while (high - low > 1) {
    const Key middle = low + (high - low) / 2;
    const Measure m = measure(row, middle, 0.0F, shared);
    if (enough(m.count, m.weight)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The key of the first token, likeliest first, up to which enough(count, weight) holds.
template <typename Enough>
__device__ Key find_key(const Row& row, const Enough& enough, DrawShared& shared) {
  uint32_t count = 0;
  Weight weight = 0;
  int bins[2] = {-1, -1};  // a bin, and a bin of its own histogram
  const auto inside = [&](float place) {
    return (bins[0] < 0 || bin_of(place) == bins[0]) &&
           (bins[1] < 0 || bin_of((place - bins[0]) * kBins) == bins[1]);
  };
  for (int level = 0; level < 2 && (level == 0 || shared.bin_count > kListSize); ++level) {
    clear(shared.histogram);
    for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                   [&](float logit, int32_t) {
                     const float place = row.place(logit);
                     const float w = row.weight(logit);
                     if (w > 0 && inside(place)) {
                       const int bin = bin_of(level == 0 ? place : (place - bins[0]) * kBins);
                       count_token(shared.histogram, bin, fixed(w));
                     }
                   });
    __syncthreads();
    find_bin(count, weight, enough, shared);
    bins[level] = shared.bin;
    count = shared.count_before;
    weight = shared.weight_before;
  }
  if (shared.bin_count > kListSize) {
    return bisect(row, enough, shared);
  }
  const int size = collect(row, inside, shared);
  const int first = static_cast<int>(threadIdx.x) * kRun;
  Weight weights[kRun];
  Weight sum = 0;
  for (int j = 0; j < kRun; ++j) {
    weights[j] = first + j < size ? fixed(row.weight(key_logit(shared.list[first + j]))) : 0;
    sum += weights[j];
  }
  weight += scan_block(sum, shared.sums) - sum;
  if (threadIdx.x == 0) {
    shared.key = shared.list[size - 1];
  }
  __syncthreads();
  for (int j = 0; j < kRun; ++j) {
    const uint32_t before = count + static_cast<uint32_t>(first + j);
    if (first + j < size && !enough(before, weight) && enough(before + 1, weight + weights[j])) {
      shared.key = shared.list[first + j];
    }
    weight += weights[j];
  }
  __syncthreads();
  return shared.key;
}

__device__ void draw_by_boundaries(const Row& row,
                                   const RowSampling& sampling,
                                   DrawShared& shared) {
  Key least = 0;
  if (sampling.top_k > 0) {
    const auto wanted = static_cast<uint32_t>(sampling.top_k);
    least = find_key(
        row, [&](uint32_t count, Weight) { return count >= wanted; }, shared);
  }
  if (sampling.top_p < 1) {
    const Weight total = measure(row, least, 0.0F, shared).weight;
    const double part = sampling.top_p * static_cast<double>(total);
    least = find_key(
        row, [&](uint32_t, Weight weight) { return static_cast<double>(weight) >= part; }, shared);
  }
  const Weight target = draw_target(sampling, measure(row, least, sampling.min_p, shared).weight);
  const Key key = find_key(
      row, [&](uint32_t, Weight weight) { return weight > target; }, shared);
  if (threadIdx.x == 0) {
    shared.token = key_token(key);
  }
  __syncthreads();
}

// ---- kernels ----------------------------------------------------------------------------------

/// Takes the row's histogram over, and leaves zeros in its place. Returns the number of tokens and
/// their weight.
__device__ Measure take_histogram(const SampleWorkspace& workspace,
                                  int64_t row,
                                  DrawShared& shared) {
  Measure total{0, 0};
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) {
    const uint32_t count = workspace.counts[row * kBins + i];
    const Weight weight = workspace.weights[row * kBins + i];
    workspace.counts[row * kBins + i] = 0;
    workspace.weights[row * kBins + i] = 0;
    shared.histogram.counts[i] = count;
    shared.histogram.low[i] = static_cast<uint32_t>(weight);
    shared.histogram.high[i] = static_cast<uint32_t>(weight >> 32);
    total.count += count;
    total.weight += weight;
  }
  return {sum_block(total.count, shared.counts), sum_block(total.weight, shared.sums)};
}

/// Draws a token; all threads get it.
__device__ int32_t draw(const Row& row,
                        RowSampling sampling,
                        const SampleWorkspace& workspace,
                        int64_t number,
                        DrawShared& shared) {
  Measure total{0, 0};
  if (is_ranked(sampling)) {
    total = take_histogram(workspace, number, shared);
    if (static_cast<uint32_t>(sampling.top_k) >= total.count) {
      sampling.top_k = 0;  // all tokens
    }
  }
  if (!is_ranked(sampling)) {
    draw_in_order(row, sampling, workspace.pieces + number * kMaxPieces, shared);
    return shared.token;
  }
  const auto top_k = static_cast<uint32_t>(sampling.top_k);
  const double part = sampling.top_p * static_cast<double>(total.weight);
  find_bin(
      0, 0,
      [&](uint32_t count, Weight weight) {
        return top_k > 0 ? count >= top_k : static_cast<double>(weight) >= part;
      },
      shared);
  if (shared.count_before + shared.bin_count <= kListSize) {
    draw_from_list(row, sampling, shared.bin, total.weight, shared);
  } else {
    draw_by_boundaries(row, sampling, shared);
  }
  return shared.token;
}

__device__ void write_logprob(const SampleArgs& args,
                              const SampleWorkspace& workspace,
                              int64_t row,
                              int32_t token) {
  if (threadIdx.x == 0) {
    args.logprobs[row] = static_cast<float>(
        static_cast<double>(args.logits[row * args.stride + token]) - workspace.log_sum[row]);
  }
  __syncthreads();
  const int64_t edits =
      args.edits != nullptr ? min(args.max_edits, int64_t{args.edit_count[0]}) : 0;
  for (int64_t i = threadIdx.x; i < edits; i += kThreads) {  // an edited logit: as it was
    if (args.edits[i].row == row && args.edits[i].token == token) {
      args.logprobs[row] =
          static_cast<float>(static_cast<double>(workspace.replaced[i]) - workspace.log_sum[row]);
    }
  }
}

__global__ __launch_bounds__(kThreads) void draw_kernel(const SampleArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  __shared__ DrawShared shared;
  const int64_t row = blockIdx.x;
  const SampleWorkspace workspace = sample_workspace(args);
  const RowSampling sampling = args.sampling[row];
  const Key best = workspace.best[row];
  const bool finite = workspace.not_finite[row] == 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    workspace.best[row] = 0;
    workspace.not_finite[row] = 0;
  }
  int32_t token = -1;
  if (finite && best != 0) {
    token = key_token(best);
    if (args.range == SampleRange::kAny && sampling.inverse_temperature > 0) {
      const Row view{args.logits + row * args.stride, args.vocab, key_logit(best),
                     sampling.inverse_temperature};
      token = draw(view, sampling, workspace, row, shared);
    }
  }
  if (threadIdx.x == 0) {
    args.tokens[row] = token;
    if (args.next != nullptr) {
      args.next[row] = token;
    }
    args.status[row] = !finite     ? SampleStatus::kNotFinite
                       : best == 0 ? SampleStatus::kNoneLeft
                                   : SampleStatus::kOk;
  }
  if (args.logprobs != nullptr && sampling.logprobs >= 0 && token >= 0) {
    write_logprob(args, workspace, row, token);
  }
}

/// The likeliest token after that of `above`.
__device__ Key next_likeliest(const Row& row, Key above, DrawShared& shared) {
  Key best = 0;
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t token) {
                   const Key key = sample_key(logit, token);
                   best = is_finite(logit) && key < above && key > best ? key : best;
                 });
  return max_block(best, shared.keys);
}

__global__ __launch_bounds__(kThreads) void top_logprobs_kernel(const SampleArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  __shared__ DrawShared shared;
  const int64_t r = blockIdx.x;
  const int wanted = args.sampling[r].logprobs;
  if (wanted < 0) {
    return;
  }
  Row row{args.logits + r * args.stride, args.vocab, 0.0F, 1.0F};
  Key key = next_likeliest(row, ~Key{0}, shared);
  row.largest = key_logit(key);
  Weight sum = 0;
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t) { sum += fixed(row.weight(logit)); });
  sum = sum_block(sum, shared.sums);
  const double log_sum =
      static_cast<double>(row.largest) + log(static_cast<double>(sum) / kWeightOne);
  if (threadIdx.x == 0) {
    sample_workspace(args).log_sum[r] = log_sum;
  }
  for (int i = 0; i < wanted && i < kMaxTopLogprobs; ++i) {
    if (threadIdx.x == 0) {
      TopLogprob out{-1, 0.0F};
      if (key != 0) {
        out = {key_token(key), static_cast<float>(static_cast<double>(key_logit(key)) - log_sum)};
      }
      args.top[r * kMaxTopLogprobs + i] = out;
    }
    key = key != 0 && i + 1 < wanted ? next_likeliest(row, key, shared) : 0;
  }
}

}  // namespace

cudaError_t launch_top_logprobs(const SampleArgs& args, const LaunchContext& context) {
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = kThreads};
  return launch(top_logprobs_kernel, grid, context, args);
}

cudaError_t launch_draw(const SampleArgs& args, const LaunchContext& context) {
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = kThreads};
  return launch(draw_kernel, grid, context, args);
}

}  // namespace nibble::cuda
