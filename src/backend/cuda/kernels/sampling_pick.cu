// Picks of tokens, part two: one block per row draws from the distribution that temperature,
// top-k, top-p and min-p leave, or takes the likeliest token.
//
// Weights exp((logit - largest) / temperature) are counted as integers, in steps of 2^-44, so that
// sums are exact and do not depend on their order. Without top-k and top-p the draw walks the
// tokens in their order. With them it walks the most likely ones first: a histogram over equal
// steps of the exponent says how deep the kept tokens reach, these are collected and sorted in
// shared memory, and sums along the list give every boundary. Where they do not fit (a flat
// distribution) each boundary is found by itself, in a histogram of one bin of the histogram, of
// which a list is sorted; where thousands of logits are equal, by bisection over the keys.

#include "backend/cuda/kernels/sampling_common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

using Key = unsigned long long;
using Weight = unsigned long long;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr float kBinsPerNat = 32.0F;
constexpr int kListSize = 4096;
constexpr int kRun = kListSize / kThreads;  // elements of the list per thread
constexpr int kWeightBits = 44;             // 2^19 weights of at most 1 << 44 stay below 2^64
constexpr double kWeightOne = 0x1p44;

struct Histogram {
  uint32_t counts[kBins];
  uint32_t low[kBins];  // weights: their lower and their upper words
  uint32_t high[kBins];
};

struct PickShared {
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

/// A row and its distribution.
struct Row {
  const float* logits;
  int64_t vocab;
  float largest;
  float inverse;

  __device__ float weight(float logit) const {
    return __float_as_uint(logit) == kBanned ? 0.0F : expf((logit - largest) * inverse);
  }
  /// Place on the axis of bins, from the largest logit on.
  __device__ float place(float logit) const { return (largest - logit) * inverse * kBinsPerNat; }
};

__device__ __forceinline__ int bin_of(float place) {
  return min(kBins - 1, static_cast<int>(place));
}

/// weight * kWeightOne, rounded down, for weights of at most 1: by shifts, as the conversion to 64
/// bits is slow.
__device__ __forceinline__ Weight fixed(float weight) {
  const uint32_t bits = __float_as_uint(weight);
  const int shift = static_cast<int>(bits >> 23) - (127 + 23 - kWeightBits);
  const uint32_t mantissa = (bits & 0x7fffffU) | 0x800000U;
  return shift >= 0 ? static_cast<Weight>(mantissa) << shift
                    : static_cast<Weight>(mantissa >> min(-shift, 31));
}

/// 64-bit sums by 32-bit atomics, which shared memory has: the carry follows the lower word.
__device__ __forceinline__ void count_token(Histogram& histogram, int bin, Weight weight) {
  atomicAdd(histogram.counts + bin, 1U);
  const auto low = static_cast<uint32_t>(weight);
  const uint32_t before = atomicAdd(histogram.low + bin, low);
  const auto high = static_cast<uint32_t>(weight >> 32) + (before + low < before ? 1U : 0U);
  if (high != 0) {
    atomicAdd(histogram.high + bin, high);
  }
}

__device__ __forceinline__ void clear(Histogram& histogram) {
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) {
    histogram.counts[i] = 0;
    histogram.low[i] = 0;
    histogram.high[i] = 0;
  }
  __syncthreads();
}

/// The step's number in [0, 1), as Sampler::uniform().
__device__ double uniform(uint64_t seed, int64_t step) {
  uint64_t x = seed;
  const uint64_t words[2] = {static_cast<uint64_t>(step), 0x5851f42d4c957f2dULL};
  for (const uint64_t word : words) {
    x += word * 0x9e3779b97f4a7c15ULL + 0x632be59bd9b4e019ULL;
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    x ^= x >> 31;
  }
  return static_cast<double>(x >> 11) * 0x1.0p-53;
}

/// The draw picks the first token up to which the weights sum to more than this.
__device__ Weight draw_target(const RowSampling& sampling, Weight total) {
  const double target = uniform(sampling.seed, sampling.step) * static_cast<double>(total);
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

/// Tokens per warp: every warp walks one piece of the row.
__device__ int64_t warp_piece(int64_t vocab) {
  return (vocab + kThreads * 4 - 1) / (kThreads * 4) * 128;
}

/// `value` of this lane and those before it.
__device__ __forceinline__ Weight scan_warp(Weight value) {
  for (int offset = 1; offset < 32; offset *= 2) {
    const Weight other = __shfl_up_sync(kEveryLane, value, offset);
    value += threadIdx.x % 32 >= static_cast<unsigned>(offset) ? other : 0;
  }
  return value;
}

/// The token at which the sum of weights of at least min_p passes the target. `below` is the sum of
/// the warps before this one, `own` this warp's.
__device__ void draw_in_order(
    const Row& row, float min_p, Weight target, Weight below, Weight own, PickShared& shared) {
  if (target < below || target >= below + own) {
    return;
  }
  const auto steps_of = [&](float logit) {
    const float w = row.weight(logit);
    return w >= min_p ? fixed(w) : 0;
  };
  // Which lane's run of the warp's piece has it, and then which token of the run.
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int64_t run = warp_piece(row.vocab) / 32;
  const int64_t begin = (threadIdx.x / 32 * 32 + lane) * run;
  Weight sum = 0;
  for_each_logit(row.logits, begin, min(begin + run, row.vocab), 0, 1,
                 [&](float logit, int32_t) { sum += steps_of(logit); });
  const Weight up_to = below + scan_warp(sum);
  const int owner = __ffs(static_cast<int>(__ballot_sync(kEveryLane, up_to > target))) - 1;
  Weight passed = __shfl_sync(kEveryLane, up_to - sum, owner);
  for (int64_t first = __shfl_sync(kEveryLane, begin, owner); passed <= target; first += 32) {
    const int64_t token = first + lane;
    const Weight reached = passed + scan_warp(token < row.vocab ? steps_of(row.logits[token]) : 0);
    const unsigned over = __ballot_sync(kEveryLane, reached > target);
    if (over != 0 && lane == __ffs(static_cast<int>(over)) - 1) {
      shared.token = static_cast<int32_t>(token);
    }
    passed = __shfl_sync(kEveryLane, reached, 31);
  }
}

// ---- draws by likelihood, in a list -----------------------------------------------------------

/// Finds the first bin up to which enough(count, weight) holds, the last bin if there is none, and
/// what stands before it. `count` and `weight` stand before the histogram, which is not needed any
/// more afterwards; the list is empty.
template <typename Enough>
__device__ void find_bin(uint32_t count, Weight weight, const Enough& enough, PickShared& shared) {
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
__device__ int collect(const Row& row, const Wanted& wanted, PickShared& shared) {
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t token) {
                   if (wanted(row.place(logit)) && row.weight(logit) > 0) {
                     shared.list[atomicAdd(&shared.list_count, 1U)] = pick_key(logit, token);
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
    const Row& row, const RowSampling& sampling, int bin, Weight total, PickShared& shared) {
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
__device__ Measure measure(const Row& row, Key least, float min_p, PickShared& shared) {
  uint32_t count = 0;
  Weight weight = 0;
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t token) {
                   const float w = row.weight(logit);
                   if (w > 0 && w >= min_p && pick_key(logit, token) >= least) {
                     ++count;
                     weight += fixed(w);
                   }
                 });
  return {sum_block(count, shared.counts), sum_block(weight, shared.sums)};
}

/// As find_key(), for any distribution: a pass over the row for each bit of the answer.
template <typename Enough>
__device__ Key bisect(const Row& row, const Enough& enough, PickShared& shared) {
  Key low = 0;  // enough
  Key high = pick_key(row.largest, 0) + 1;
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
__device__ Key find_key(const Row& row, const Enough& enough, PickShared& shared) {
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
                                   PickShared& shared) {
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

/// Draws a token; all threads get it.
__device__ int32_t draw(const Row& row, const RowSampling& sampling, PickShared& shared) {
  const bool top_p = sampling.top_p < 1;
  const bool ranked = sampling.top_k > 0 || top_p;
  if (ranked) {
    clear(shared.histogram);
  }
  const int64_t piece = warp_piece(row.vocab);
  const int64_t begin = threadIdx.x / 32 * piece;
  uint32_t count = 0;
  Weight all = 0;
  Weight likely = 0;  // those that min_p leaves
  for_each_logit(row.logits, begin, min(begin + piece, row.vocab),
                 static_cast<int>(threadIdx.x % 32), 32, [&](float logit, int32_t) {
                   const float w = row.weight(logit);
                   const Weight steps = fixed(w);
                   if (w > 0) {
                     ++count;
                     all += steps;
                     likely += w >= sampling.min_p ? steps : 0;
                     if (top_p) {
                       count_token(shared.histogram, bin_of(row.place(logit)), steps);
                     } else if (ranked) {
                       atomicAdd(shared.histogram.counts + bin_of(row.place(logit)), 1U);
                     }
                   }
                 });
  count = sum_block(count, shared.counts);
  if (!top_p && (sampling.top_k == 0 || static_cast<uint32_t>(sampling.top_k) >= count)) {
    const Weight up_to = scan_block(likely, shared.sums);
    const Weight own_end = __shfl_sync(kEveryLane, up_to, 31);
    const Weight own = own_end - __shfl_sync(kEveryLane, up_to - likely, 0);
    const Weight target = draw_target(sampling, sum_block(likely, shared.sums));
    draw_in_order(row, sampling.min_p, target, own_end - own, own, shared);
    __syncthreads();
    return shared.token;
  }
  all = sum_block(all, shared.sums);
  RowSampling effective = sampling;
  if (static_cast<uint32_t>(sampling.top_k) >= count) {
    effective.top_k = 0;
  }
  const bool top_k = effective.top_k > 0;
  const double part = top_k ? 0.0 : sampling.top_p * static_cast<double>(all);
  find_bin(
      0, 0,
      [&](uint32_t c, Weight w) {
        return top_k ? c >= static_cast<uint32_t>(effective.top_k) : static_cast<double>(w) >= part;
      },
      shared);
  if (shared.count_before + shared.bin_count <= kListSize) {
    draw_from_list(row, effective, shared.bin, all, shared);
  } else {
    draw_by_boundaries(row, effective, shared);
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

__global__ __launch_bounds__(kThreads) void pick_kernel(const SampleArgs args) {
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  __shared__ PickShared shared;
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
    if (sampling.inverse_temperature > 0) {
      const Row view{args.logits + row * args.stride, args.vocab, key_logit(best),
                     sampling.inverse_temperature};
      token = draw(view, sampling, shared);
    }
  }
  if (threadIdx.x == 0) {
    args.tokens[row] = token;
    args.status[row] = !finite     ? PickStatus::kNotFinite
                       : best == 0 ? PickStatus::kNoneLeft
                                   : PickStatus::kOk;
  }
  if (args.logprobs != nullptr && sampling.logprobs >= 0 && token >= 0) {
    write_logprob(args, workspace, row, token);
  }
}

/// The likeliest token after that of `above`.
__device__ Key next_likeliest(const Row& row, Key above, PickShared& shared) {
  Key best = 0;
  for_each_logit(row.logits, 0, row.vocab, static_cast<int>(threadIdx.x), kThreads,
                 [&](float logit, int32_t token) {
                   const Key key = pick_key(logit, token);
                   best = is_finite(logit) && key < above && key > best ? key : best;
                 });
  return max_block(best, shared.keys);
}

__global__ __launch_bounds__(kThreads) void top_logprobs_kernel(const SampleArgs args) {
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  __shared__ PickShared shared;
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

cudaError_t launch_pick(const SampleArgs& args, const LaunchContext& context) {
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = kThreads};
  return launch(pick_kernel, grid, context, args);
}

}  // namespace nibble::cuda
