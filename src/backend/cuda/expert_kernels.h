#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/launch.h"
#include "core/dtype.h"
#include "core/expert_counts.h"
#include "core/router_form.h"

namespace nibble::cuda {

// What the experts of a layer need besides products. All pointers are device memory.

/// Numbers in BF16 whose sum is a number in F32: 24 bits in three times eight.
constexpr int kRouterPlanes = 3;

/// logits[row, e] = x[row] · router[e] (+ bias[e]), summed in f32 in an order that does not depend
/// on the rows of the step: a token takes the same experts in every batch.
///   x [rows, hidden] bf16; router [planes, experts, hidden] bf16, the sum of its planes, 1 or
///   kRouterPlanes; bias [experts] f32 or null; hidden a multiple of 8
struct RouterLogitsArgs {
  const void* x = nullptr;
  const uint16_t* router = nullptr;
  int planes = 1;
  const float* bias = nullptr;
  int64_t rows = 0;
  int64_t hidden = 0;
  int32_t experts = 0;
  float* logits = nullptr;
};
cudaError_t router_logits(const RouterLogitsArgs& args, const LaunchContext& context);

/// A slot whose expert another device has: no row of any product.
constexpr int32_t kNoSlot = -1;

/// route() for each row: a warp per row. Chosen experts are numbered from first_expert on; those
/// that are none of `present` become -1, and their slots kNoSlot. So do all of rows that only fill
/// a recorded step up.
///   logits [rows, experts] f32, correction [experts] f32 or null
///   chosen [rows, top_k], weights [rows, top_k], slot_of [rows, top_k]; null where all are present
///   rows_there [1], how many rows the step has, or null: all of them
struct RouteRowsArgs {
  const float* logits = nullptr;
  const float* correction = nullptr;
  RouterForm form;
  int32_t experts = 0;  // at most 1024, in at most 32 groups
  int32_t top_k = 0;
  int64_t rows = 0;
  int32_t* chosen = nullptr;
  float* weights = nullptr;
  int32_t first_expert = 0;
  int32_t present = INT32_MAX;
  int32_t* slot_of = nullptr;
  const int32_t* rows_there = nullptr;
};
cudaError_t route_rows(const RouteRowsArgs& args, const LaunchContext& context);

/// Orders the slots (row, choice) by experts, then rows, and lists tiles of one expert's rows,
/// those of most steps first; those past a list's last have no rows. Experts of up to cut.few rows
/// are in the second list. Slots of no expert (-1) are passed over.
///   slot_of [rows, top_k], tiles [1 or 2][max_tiles], tile_count [1 or 2]
///   expert_of [rows * top_k], of each slot in the new order that has an expert, or null
///   slot_count: slots that have an expert, or null; counts: what this run is added to, or null
struct SortSlotsArgs {
  const int32_t* chosen = nullptr;
  int32_t experts = 0;
  int32_t top_k = 0;
  int64_t rows = 0;
  TileRows cut;
  int32_t* slot_of = nullptr;
  int32_t* expert_of = nullptr;
  ExpertTile* tiles = nullptr;
  int32_t* tile_count = nullptr;
  int64_t max_tiles = 0;
  int32_t* slot_count = nullptr;
  ExpertCounts* counts = nullptr;
};
cudaError_t sort_slots(const SortSlotsArgs& args, const LaunchContext& context);

/// route_rows(), then sort_slots() of what it chose: one launch where rows are few.
cudaError_t route_and_sort(const RouteRowsArgs& route,
                           const SortSlotsArgs& sort,
                           const LaunchContext& context);

/// Slots where every expert has every row: slot_of[row, i] = chosen[row, i] * rows + row; those of
/// no expert (-1) stay as they are.
///   chosen, slot_of [rows, top_k]
struct NumberSlotsArgs {
  const int32_t* chosen = nullptr;
  int32_t top_k = 0;
  int64_t rows = 0;
  int32_t* slot_of = nullptr;
};
cudaError_t number_slots(const NumberSlotsArgs& args, const LaunchContext& context);

/// to[slot_of[row, i]] = from[row] for each i that has a slot, rows of row_bytes, a multiple of 16,
/// and their scales, if any:
///   scales [rows, row_scales], slot_scales [slots, row_scales] f32; where strides are given
///   [row_scales, stride] for each of them, the scales of a row below each other
struct ScatterRowsArgs {
  const void* from = nullptr;
  const float* scales = nullptr;
  int64_t row_scales = 0;
  const int32_t* slot_of = nullptr;
  int32_t top_k = 0;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  void* to = nullptr;
  float* slot_scales = nullptr;
  int64_t scale_stride = 0;
  int64_t slot_scale_stride = 0;
};
cudaError_t scatter_rows(const ScatterRowsArgs& args, const LaunchContext& context);

/// y[row] += the sum of weights[row, i] * results[slot_of[row, i]] over those i that have a slot,
/// in the order of choice, and then beside[row].
///   beside [rows, n] f32 or null
///   results [slots, n] f32 or bf16, y [rows, n] f32, rows y_stride apart; n and the stride
///   multiples of 4
struct CombineSlotsArgs {
  const void* results = nullptr;
  DType type = DType::kF32;  // of the results
  const int32_t* slot_of = nullptr;
  const float* weights = nullptr;
  int32_t top_k = 0;
  int64_t rows = 0;
  int64_t n = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  const float* beside = nullptr;
};
cudaError_t combine_slots(const CombineSlotsArgs& args, const LaunchContext& context);

}  // namespace nibble::cuda
