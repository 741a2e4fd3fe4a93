// Cuts a step's decode work into equal shares of tiles and its prefill work into blocks of rows.
// One block; runs once per step and kind of layers.

#include <algorithm>
#include <iterator>
#include <numbers>
#include <vector>

#include "backend/cuda/kernels/attention/kv_forms.cuh"
#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/memory.h"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 512;
// Of many items of so many tiles or fewer, as a mean, a warp has whole ones alone.
constexpr int32_t kAloneTiles = 8;

struct PlanArgs {
  const int32_t* q_begin;
  const int32_t* kv_len;
  int32_t sequences;
  LineForm form;
  PlanView plan;
};

/// Sum of `value` over the threads before this one; `total` over all.
__device__ int32_t scan_block(int32_t value, int32_t* warp_sums, int32_t& total) {
  const int lane = threadIdx.x % 32;
  int32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0U, sum, step);
    sum += lane >= step ? other : 0;
  }
  __syncthreads();
  if (lane == 31) {
    warp_sums[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  int32_t before = 0;
  total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    before += warp < static_cast<int>(threadIdx.x / 32) ? warp_sums[warp] : 0;
    total += warp_sums[warp];
  }
  return before + sum - value;
}

/// Last sequence that begins at or before a place in the line: the one that holds it.
__device__ int32_t find_sequence(const int32_t* begin, int32_t sequences, int32_t place) {
  int32_t low = 0;
  int32_t high = sequences;  // begin[low] <= place < begin[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (begin[middle] <= place ? low : high) = middle;
  }
  return low;
}

__global__ __launch_bounds__(kThreads) void plan_kernel(const PlanArgs args) {
  __shared__ int32_t warp_sums[kThreads / 32];
  ptx::wait_for_predecessor();
  const PlanView& plan = args.plan;
  const LineForm& form = args.form;
  int32_t total = 0;
  int32_t item_total = 0;
  int32_t prefill_total = 0;
  for (int32_t start = 0; start < args.sequences; start += kThreads) {
    const int32_t s = start + static_cast<int32_t>(threadIdx.x);
    const bool valid = s < args.sequences;
    const int32_t row = valid ? args.q_begin[s] : 0;
    const int32_t rows = valid ? args.q_begin[s + 1] - row : 0;
    PlannedSequence planned{0, 0, valid ? args.kv_len[s] : 0, row};
    const bool on_line = rows <= form.line_rows;
    if (rows > 0 && on_line && planned.kv_len > 0) {
      const int32_t first = form.window > 0 ? max(0, planned.kv_len - form.window) : 0;
      planned.first_tile = first / form.tile_tokens;
      planned.end_tile = (planned.kv_len + form.tile_tokens - 1) / form.tile_tokens;
    }
    int32_t added = 0;
    const int32_t items = form.kv_heads * ((rows * form.ratio + form.columns - 1) / form.columns);
    const int32_t tiles = (planned.end_tile - planned.first_tile) * items;
    const int32_t begin = total + scan_block(tiles, warp_sums, added);
    total += added;
    scan_block(tiles > 0 ? items : 0, warp_sums, added);
    item_total += added;
    const bool none = on_line || planned.kv_len == 0;
    const int32_t blocks = none ? 0 : (rows + kPrefillRows - 1) / kPrefillRows;
    const int32_t prefill = prefill_total + scan_block(blocks, warp_sums, added);
    prefill_total += added;
    if (valid) {
      plan.sequences[s] = planned;
      plan.sequence_begin[s] = begin;
      for (int32_t i = 0; i < blocks; ++i) {
        plan.prefill[prefill + i] = {s, i * kPrefillRows};
      }
    }
  }
  const int32_t blocks = min(form.blocks, (total + form.least_tiles - 1) / form.least_tiles);
  const bool alone =
      item_total >= blocks * kManyItems && total <= int64_t{item_total} * kAloneTiles;
  if (threadIdx.x == 0) {
    plan.sequence_begin[args.sequences] = total;
    *plan.prefill_count = prefill_total;
  }
  __syncthreads();
  for (int32_t block = static_cast<int32_t>(threadIdx.x); block < form.blocks; block += kThreads) {
    if (block >= blocks) {
      plan.starts[block] = {};
      continue;
    }
    const int32_t place = share_begin(block, blocks, total);
    const int32_t s = find_sequence(plan.sequence_begin, args.sequences, place);
    const PlannedSequence first = plan.sequences[s];
    const int32_t tiles = first.end_tile - first.first_tile;
    const int32_t inside = place - plan.sequence_begin[s];
    plan.starts[block] = {s,
                          inside / tiles,
                          first.first_tile + inside % tiles,
                          place,
                          share_begin(block + 1, blocks, total),
                          blocks,
                          total,
                          alone ? 1 : 0,
                          first};
  }
  __threadfence();  // decode reads the plan before it waits
}

}  // namespace

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0;
  int value = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) {
    return 0;
  }
  return value;
}

int compute_capability() {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
         device_attribute(cudaDevAttrComputeCapabilityMinor);
}

DecodeGrid decode_grid(const AttentionShape& shape) {
  const KvLayout& kv = shape.kv;
  DecodeGrid grid;
  const int32_t ratio = shape.heads / kv.kv_heads;
  grid.columns = ratio > 8 && kv.head_dim <= 128 ? 16 : 8;
  grid.groups = (ratio + grid.columns - 1) / grid.columns;
  // Sums of all warps, then barriers, then as many ring stages as two blocks leave room for.
  const int32_t used = std::min(ratio, grid.columns);
  const int32_t fixed = kDecodeWarps * (used * (kv.head_dim + 4) * 4 + grid.columns * 8) + 256;
  const int32_t stage = kDecodeWarps * kv_tile_bytes(kv.code, kv.head_dim);
  const int32_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  int32_t per_sm = 2;
  grid.stages = (shared / per_sm - 1024 - fixed) / stage;
  if (grid.stages < 2) {
    per_sm = 1;
    grid.stages = (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - fixed) / stage;
  }
  grid.stages = std::min(grid.stages, 4);
  grid.shared_bytes = fixed + grid.stages * stage;
  grid.blocks =
      std::min(per_sm * device_attribute(cudaDevAttrMultiProcessorCount), max_parts(kv.head_dim));
  return grid;
}

float score_factor(const AttentionShape& shape) {
  const float factor = shape.scale * std::numbers::log2e_v<float>;
  switch (kv_format(shape.kv.code).per) {
    case KvParameters::kPerTokenHead:  // codes stand as fp16 subnormals
    case KvParameters::kPerChannel:
    case KvParameters::kPerChannelPage:
      return factor * 0x1p24F;
    case KvParameters::kPerTensor:
      return factor * shape.k_scale;
    default:
      return factor;
  }
}

int64_t prefill_blocks(int64_t sequences, int64_t rows) {
  return rows / kPrefillRows + std::min(sequences, rows / 2);
}

PagedArgs paged_args(const AttentionLaunch& launch) {
  const AttentionShape& shape = launch.shape;
  const bool shared = shape.form == AttentionForm::kShared && shape.kv.code == KvCode::kBf16;
  return {.q = static_cast<const uint16_t*>(launch.q),
          .q_stride = launch.q_stride,
          .out = static_cast<uint16_t*>(launch.out),
          .out_stride = launch.out_stride,
          .pages = static_cast<const uint8_t*>(launch.pages),
          .page_bytes = page_bytes(shape.kv),
          .page_table = launch.step.page_table,
          .page_table_stride = launch.step.page_table_stride,
          .residual = static_cast<const uint8_t*>(launch.residual.pages),
          .residual_table = launch.residual.page_table,
          .tiles_per_page = shape.kv.page_size / kv_tile_tokens(shape.kv.code),
          .kv_heads = shape.kv.kv_heads,
          .ratio = shape.heads / shape.kv.kv_heads,
          .window = shape.sliding_window,
          .score_factor = score_factor(shape),
          .value_factor =
              kv_format(shape.kv.code).per == KvParameters::kPerTensor ? shape.v_scale : 1.0F,
          .top_factor = shared ? 1.0F : score_factor(shape),
          .shared = shared,
          .sinks = launch.sinks,
          .plan = view_plan(const_cast<void*>(launch.plan), decode_grid(shape).blocks,
                            launch.step.sequences, launch.step.rows)};
}

PlanView view_plan(void* plan, int32_t blocks, int32_t sequences, int32_t rows) {
  PlanView view;
  auto* bytes = static_cast<uint8_t*>(plan);
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(
        bytes + place(view.bytes, static_cast<size_t>(count) * sizeof(*pointer)));
  };
  take(view.prefill_count, 1);
  take(view.starts, blocks);
  take(view.sequences, sequences);
  take(view.sequence_begin, sequences + 1);
  take(view.prefill, prefill_blocks(sequences, rows));
  return view;
}

Status check_attention(const AttentionShape& shape) {
  const KvLayout& kv = shape.kv;
  const auto refuse = [](std::string_view what, int64_t value, std::string_view remedy) {
    return make_error(StatusCode::kInvalidArgument, "attention on the GPU: {} is {}; {}", what,
                      value, remedy);
  };
  const auto needed_for = [](KvCode code) {  // compute capability, times 10; 0: no kernels
    return with_kv_form(
        code, [&]<KvCode kCode>() { return KvForm<kCode>::kCapability; }, 0);
  };
  const int needed = needed_for(kv.code);
  if (needed == 0) {
    std::vector<KvCode> known;
    std::ranges::copy_if(kKvCodes, std::back_inserter(known), needed_for);
    return make_error(StatusCode::kInvalidArgument,
                      "attention on the GPU: there are no kernels for a cache in {}, but for {}; "
                      "choose one of these by --kv-cache-dtype",
                      kv_code_name(kv.code), kv_code_names(known));
  }
  if (kv.head_dim != 64 && kv.head_dim != 128 && kv.head_dim != 256) {
    return refuse("head_dim must be 64, 128 or 256; it", kv.head_dim, "use --device cpu");
  }
  if (kv.kv_heads <= 0 || shape.heads <= 0 || shape.heads % kv.kv_heads != 0) {
    return refuse("query heads must be a multiple of KV heads; their number", shape.heads,
                  "use --device cpu");
  }
  if (kv.page_size <= 0 || kv.page_size % kv_tile_tokens(kv.code) != 0) {
    return refuse(
        "pages must hold a multiple of 16 (bf16), 32 (8 bits) or 64 (int4) tokens; theirs",
        kv.page_size, "choose another --block-size");
  }
  const int capability = compute_capability();
  if (capability < needed) {
    return make_error(StatusCode::kInvalidArgument,
                      "attention on the GPU: the device's compute capability must be {:.1f} for a "
                      "cache in {}; it is {:.1f}; choose another --kv-cache-dtype or --device cpu",
                      needed / 10.0, kv_code_name(kv.code), capability / 10.0);
  }
  return {};
}

size_t attention_plan_bytes(const AttentionShape& shape, int32_t max_sequences, int32_t max_rows) {
  return view_plan(nullptr, decode_grid(shape).blocks, max_sequences, max_rows).bytes;
}

cudaError_t plan_line(const LineForm& form,
                      const StepMetadata& step,
                      void* plan,
                      const LaunchContext& context) {
  const PlanArgs args{.q_begin = step.q_begin,
                      .kv_len = step.kv_len,
                      .sequences = step.sequences,
                      .form = form,
                      .plan = view_plan(plan, form.blocks, step.sequences, step.rows)};
  return launch(plan_kernel, {dim3(1), kThreads, 0}, context, args);
}

cudaError_t plan_attention(const AttentionShape& shape,
                           const StepMetadata& step,
                           void* plan,
                           const LaunchContext& context) {
  const DecodeGrid grid = decode_grid(shape);
  const LineForm form{.kv_heads = shape.kv.kv_heads,
                      .ratio = shape.heads / shape.kv.kv_heads,
                      .columns = grid.columns,
                      .window = shape.sliding_window,
                      .tile_tokens = kv_tile_tokens(shape.kv.code),
                      .blocks = grid.blocks,
                      .least_tiles = kDecodeWarps};  // a tile per warp
  return plan_line(form, step, plan, context);
}

}  // namespace nibble::cuda
