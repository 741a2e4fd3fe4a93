// Rotates the step's queries in place and writes its rotated keys, and values, to the cache in the
// cache's format (attention/append.cuh).

#include <algorithm>

#include "backend/cuda/kernels/attention/append.cuh"
#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/kernels/attention/turn.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kManyRows = 128;  // from here on a warp does several heads of a row

/// The keys as they are of a position's page.
template <int kDim>
__device__ __forceinline__ uint8_t* residual_keys(const AppendArgs& args,
                                                  int32_t sequence,
                                                  int32_t position,
                                                  int kv_head) {
  const int32_t page =
      args.residual_table[sequence * args.page_table_stride + position / args.page_size];
  return reinterpret_cast<uint8_t*>(args.residual) +
         (int64_t{page} * args.kv_heads + kv_head) * args.page_size * (2 * kDim);
}

template <KvCode kCode, int kDim>
__global__ __launch_bounds__(32 * kWarps) void append_kernel(const AppendArgs args) {
  ptx::allow_successor();  // attention fetches what earlier steps wrote meanwhile
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x);
  const int32_t sequence = args.row_sequence[row];
  const int32_t position = args.row_position[row];
  Rotation<kDim> rotation;
  rotation.load(args, row, lane);
  rotation.set(args, position);
  ptx::wait_for_predecessor();
  if (sequence < 0) {
    return;
  }
  constexpr int kTokens = kv_tile_tokens(kCode);
  constexpr int kTileBytes = kv_tile_bytes(kCode, kDim);
  const int32_t page =
      args.page_table[sequence * args.page_table_stride + position / args.page_size];
  const int32_t slot = position % args.page_size;
  const int32_t tiles = args.page_size / kTokens;
  const int step = static_cast<int>(gridDim.y) * kWarps;
  for (int head = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32;
       head < args.heads + 2 * args.kv_heads; head += step) {
    uint16_t* const at = args.qkv + row * args.stride + int64_t{head} * kDim;
    HeadValues<kDim> x = load_head<kDim>(at, lane);
    const bool is_query = head < args.heads;
    const bool is_value = head >= args.heads + args.kv_heads;
    const int kv_head = head - args.heads - (is_value ? args.kv_heads : 0);
    HeadValues<kDim> mean = {};
    if constexpr (kv_format(kCode).turned) {
      if (!is_query) {
        mean =
            load_mean<kDim>(is_value ? args.basis.value_mean : args.basis.key_mean, kv_head, lane);
      }
    }
    if (!is_value) {
      const float* norm = is_query ? args.q_norm : args.k_norm;
      if (norm != nullptr) {
        normalise<kDim>(x, norm, args.norm_eps, lane);
      }
      rotation.apply(x);
      if (args.shared) {
        round_row<kDim>(x, is_query ? kQueryPlaces : kKeyPlaces);
      }
    }
    if constexpr (kv_format(kCode).turned) {
      subtract<kDim>(x, mean);
      if (is_value ? args.basis.turns_values : args.basis.turns_keys) {
        HeadTurn<kDim>::turn(x, lane);
      }
    }
    if constexpr (kv_format(kCode).per == KvParameters::kPerChannel) {
      if (is_query) {
        multiply_by_steps<kDim>(x, args.basis.key_step, head / (args.heads / args.kv_heads), lane);
      } else {
        divide_by_steps<kDim>(x, is_value ? args.basis.value_step : args.basis.key_step, kv_head,
                              lane, args.far_outside);
      }
    }
    if (is_query) {
      store_query<kDim>(x, at, lane);
      continue;
    }
    if constexpr (kv_has_residual(kCode)) {
      if (!is_value) {
        uint8_t* const keys = residual_keys<kDim>(args, sequence, position, kv_head);
        write_pairs<kDim>(x, lane, [&](int d, uint32_t two) {
          const int64_t to = kv_residual_offset(kDim, position % args.page_size, 2 * d);
          *reinterpret_cast<uint32_t*>(keys + to) = two;
        });
        continue;
      }
    }
    uint8_t* const tile = args.pages + page * args.page_bytes +
                          int64_t{kv_head * tiles + slot / kTokens} * kTileBytes;
    const float factor = is_value ? args.v_factor : args.k_factor;
    store_head<kCode, kDim>(code_head<kCode, kDim>(x, factor, lane), slot % kTokens, lane,
                            head_place<kCode, kDim>(tile, is_value));
  }
}

constexpr int kClosedChannels = 32;  // of a block at a time
constexpr int kCloseThreads = 4 * kClosedChannels;
constexpr int kCloseBlocks = 2;  // of a multiprocessor

/// Codes kClosedChannels channels from `channel` on of a group of keys, which `position` fills.
/// Four neighbouring threads share a channel.
template <KvCode kCode, int kDim>
__device__ __forceinline__ void close_channels(
    const AppendArgs& args, int32_t sequence, int32_t position, int kv_head, int channel) {
  constexpr int kTokens = kv_tile_tokens(kCode);
  constexpr int kEach = kTokens / 4;
  constexpr int kRow = static_cast<int>(kv_row_bytes(kCode, kDim));
  const int d = channel + static_cast<int>(threadIdx.x) / 4;
  const int first = static_cast<int>(threadIdx.x) % 4 * kEach;  // of this thread's tokens
  const uint8_t* const keys = residual_keys<kDim>(args, sequence, position, kv_head);
  const int slot = position % args.page_size - (kTokens - 1) + first;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const auto* const key =
        reinterpret_cast<const uint16_t*>(keys + kv_residual_offset(kDim, slot + i, 2 * d));
    x[i] = __uint_as_float(static_cast<uint32_t>(__ldcg(key)) << 16);
  }
  const __half2 line = fit_line(x);
  const float factor = scale_of(line) > 0.0F ? 1.0F / scale_of(line) : 0.0F;
  const int32_t page =
      args.page_table[sequence * args.page_table_stride + position / args.page_size];
  const int32_t tiles = args.page_size / kTokens;
  uint8_t* const tile =
      args.pages + page * args.page_bytes +
      int64_t{kv_head * tiles + position % args.page_size / kTokens} * kv_tile_bytes(kCode, kDim);
  const HeadPlace place = head_place<kCode, kDim>(tile, false);
  if (first == 0) {
    auto* const scales = reinterpret_cast<__half*>(place.parameters);
    scales[kv_channel_index(d)] = __low2half(line);
    scales[kDim + kv_channel_index(d)] = __high2half(line);
  }
  // Eight channels of a token, of every fourth lane, are a word.
  const uint64_t codes = KvForm<kCode>::codes(x, factor, offset_of(line));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    uint32_t word = static_cast<uint32_t>(codes >> (4 * i) & 15U) << (d % 8 * 4);
    word |= __shfl_xor_sync(~0U, word, 4);
    word |= __shfl_xor_sync(~0U, word, 8);
    word |= __shfl_xor_sync(~0U, word, 16);
    if (d % 8 == i % 8) {
      store_bytes<4>(place.rows + kv_row_offset(kRow, first + i, d / 8 * 4), word);
    }
  }
}

/// Codes the keys of the groups that the step's rows fill. All blocks look for the rows that do,
/// and share out their KV heads and channels.
template <KvCode kCode, int kDim>
__global__ __launch_bounds__(kCloseThreads) void close_groups_kernel(const AppendArgs args,
                                                                     int32_t rows) {
  constexpr int kTokens = kv_tile_tokens(kCode);
  constexpr int kWarpsOfBlock = kCloseThreads / 32;
  __shared__ int32_t last_rows[kCloseThreads];
  __shared__ int32_t counts[kWarpsOfBlock];
  ptx::allow_successor();
  const auto thread = static_cast<int>(threadIdx.x);
  const int32_t of_row = args.kv_heads * (kDim / kClosedChannels);
  auto item = static_cast<int32_t>(blockIdx.x);  // the next one, from the present rows on
  bool waited = false;
  for (int32_t begin = 0; begin < rows; begin += kCloseThreads) {
    const int32_t row = begin + thread;
    const bool fills = row < rows && args.row_sequence[row] >= 0 &&
                       args.row_position[row] % kTokens == kTokens - 1;
    const uint32_t votes = __ballot_sync(~0U, fills);
    if (thread % 32 == 0) {
      counts[thread / 32] = __popc(votes);
    }
    __syncthreads();
    int32_t before = __popc(votes & ((1U << thread % 32) - 1U)), found = 0;
#pragma unroll
    for (int warp = 0; warp < kWarpsOfBlock; ++warp) {
      before += warp < thread / 32 ? counts[warp] : 0;
      found += counts[warp];
    }
    if (fills) {
      last_rows[before] = row;
    }
    __syncthreads();
    for (; item < found * of_row; item += static_cast<int32_t>(gridDim.x)) {
      if (!waited) {
        ptx::wait_for_predecessor();
        waited = true;
      }
      const int32_t at = last_rows[item / of_row];
      close_channels<kCode, kDim>(args, args.row_sequence[at], args.row_position[at],
                                  item % of_row % args.kv_heads,
                                  item % of_row / args.kv_heads * kClosedChannels);
    }
    item -= found * of_row;
    __syncthreads();
  }
  if (!waited) {
    ptx::wait_for_predecessor();  // a grid that has ended tells its successor that all before have
  }
}

template <KvCode kCode, int kDim>
cudaError_t launch_append_kernel(const AppendArgs& args,
                                 const Grid& grid,
                                 const LaunchContext& context) {
  const cudaError_t status = launch(append_kernel<kCode, kDim>, grid, context, args);
  if constexpr (kv_has_residual(kCode)) {
    const auto rows = static_cast<int32_t>(grid.blocks.x);
    const int64_t most = int64_t{rows} * args.kv_heads * (kDim / kClosedChannels);
    const int64_t blocks = kCloseBlocks * device_attribute(cudaDevAttrMultiProcessorCount);
    const Grid groups{dim3(static_cast<unsigned>(std::min(most, blocks))), kCloseThreads, 0};
    return status != cudaSuccess
               ? status
               : launch(close_groups_kernel<kCode, kDim>, groups, context, args, rows);
  }
  return status;
}

template <KvCode kCode>
cudaError_t launch_append(const AppendArgs& args,
                          int head_dim,
                          int32_t rows,
                          const LaunchContext& context) {
  const int all = args.heads + 2 * args.kv_heads;
  const int groups = rows >= kManyRows ? 1 : (all + kWarps - 1) / kWarps;
  const Grid grid{dim3(static_cast<unsigned>(rows), static_cast<unsigned>(groups)), 32 * kWarps, 0};
  switch (head_dim) {
    case 64:
      return launch_append_kernel<kCode, 64>(args, grid, context);
    case 128:
      return launch_append_kernel<kCode, 128>(args, grid, context);
    case 256:
      return launch_append_kernel<kCode, 256>(args, grid, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

AppendArgs append_args(const RopeAppendLaunch& launch) {
  const KvLayout& kv = launch.shape.kv;
  AppendArgs out{};
  out.qkv = static_cast<uint16_t*>(launch.qkv);
  out.stride = launch.qkv_stride;
  out.row_position = launch.step.row_position;
  out.row_sequence = launch.step.row_sequence;
  out.page_table = launch.step.page_table;
  out.page_table_stride = launch.step.page_table_stride;
  out.pages = static_cast<uint8_t*>(launch.pages);
  out.page_bytes = page_bytes(kv);
  out.residual = static_cast<uint16_t*>(launch.residual.pages);
  out.residual_table = launch.residual.page_table;
  out.page_size = kv.page_size;
  out.heads = launch.shape.heads;
  out.kv_heads = kv.kv_heads;
  out.inv_freq = launch.inv_freq;
  out.inv_freq_stride = launch.inv_freq_stride;
  out.attention_factor = launch.attention_factor;
  out.q_norm = launch.q_norm;
  out.k_norm = launch.k_norm;
  out.norm_eps = launch.norm_eps;
  out.k_factor = 1.0F / launch.shape.k_scale;
  out.v_factor = 1.0F / launch.shape.v_scale;
  out.shared = launch.shape.form == AttentionForm::kShared;
  out.basis = launch.basis;
  out.far_outside = launch.far_outside;
  return out;
}

cudaError_t rope_append(const RopeAppendLaunch& args, const LaunchContext& context) {
  const KvLayout& kv = args.shape.kv;
  const AppendArgs out = append_args(args);
  const auto launch = [&]<KvCode kCode>() {
    return launch_append<kCode>(out, kv.head_dim, args.step.rows, context);
  };
  return with_kv_form(kv.code, launch, cudaErrorInvalidValue);
}

}  // namespace nibble::cuda
