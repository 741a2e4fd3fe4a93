#include "backend/cpu/cpu_heads.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/math.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kChunksPerThread = 4;           // evens out threads that are interrupted
constexpr int64_t kUnit = 4;                      // weight tiles that a kernel takes at once
constexpr int64_t kRowBytes = int64_t{32} << 20;  // of rounded rows at a time
constexpr int64_t kColumns = 64 * kSlabPieces;    // as Workspace::reserve() fills rows up

/// Rows of each head at a time: whole row tiles.
int64_t rows_at_a_time(int64_t heads, int64_t k, int64_t max_m) {
  const int64_t of_row = heads * round_up(k, kColumns) * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::max<int64_t>(1, kRowBytes / of_row / kTileRows);
  return std::min(most, ceil_div(max_m, kTileRows)) * kTileRows;
}

}  // namespace

int64_t CpuHeads::workspace_bytes(int64_t heads, int64_t k, int64_t max_m) {
  return rows_at_a_time(heads, k, max_m) * heads * round_up(k, kColumns) *
         static_cast<int64_t>(sizeof(float));
}

CpuHeads::CpuHeads(std::vector<PackedMatrix> matrices,
                   const Request& request,
                   const TiledProduct& product,
                   const GemmDevice& device)
    : matrices_(std::move(matrices)),
      product_(matrices_.front(), request.act, product, device),
      workspace_(device.workspace),
      rows_(rows_at_a_time(std::ssize(matrices_), matrices_.front().k(), request.max_m)) {}

Result<std::unique_ptr<PreparedHeads>> CpuHeads::create(const Request& request,
                                                        const TiledProduct& product,
                                                        const GemmDevice& device) {
  CHECK_GT(request.max_m, 0);
  Workspace& workspace = device.workspace;
  std::vector<PackedMatrix> matrices;
  for (const QuantView& head : request.heads) {
    NIBBLE_ASSIGN_OR_RETURN(
        PackedMatrix matrix,
        PackedMatrix::create({&head, 1}, request.act.format, device.arena, workspace.pool()));
    CHECK(head.n == request.heads.front().n && head.k == request.heads.front().k);
    matrices.push_back(std::move(matrix));
  }
  std::unique_ptr<CpuHeads> heads(new CpuHeads(std::move(matrices), request, product, device));
  const int64_t rows = std::ssize(request.heads) * heads->rows_;
  NIBBLE_RETURN_IF_ERROR(workspace.reserve(rows, request.heads.front().k));
  if (heads->product_.in_tiles(heads->rows_)) {
    NIBBLE_RETURN_IF_ERROR(workspace.reserve_tiles());
  }
  return std::unique_ptr<PreparedHeads>(std::move(heads));
}

int64_t CpuHeads::weight_bytes() const { return std::ssize(matrices_) * matrices_.front().bytes(); }

void CpuHeads::run(const HeadsArgs& args) {
  for (int64_t row = 0; row < args.m; row += rows_) {
    HeadsArgs part = args;
    part.x = args.x.at(row * args.x_stride);
    part.y = args.y.at(row * args.y_stride);
    part.m = std::min(rows_, args.m - row);
    if (!product_.rounder().reads_as_given(part.x.type, {})) {
      round_rows(part);
    }
    multiply(part);
  }
}

RoundedRows CpuHeads::rounded_rows(int64_t head, int64_t m) const {
  const int64_t bytes = round_up(product_.rows_bytes(m), 64);
  return {.memory = reinterpret_cast<uint8_t*>(workspace_.activations()) + head * bytes,
          .scales = workspace_.scales() + head * m,
          .sums = workspace_.sums() + head * m,
          .m = m};
}

void CpuHeads::round_rows(const HeadsArgs& args) {
  const int64_t heads = std::ssize(matrices_);
  for_rows(
      workspace_.pool(), args.m * heads, product_.rounder().k(), [&](int64_t index, int thread) {
        const int64_t row = index / heads;
        const int64_t head = index % heads;
        product_.rounder().round(args.x.at(row * args.x_stride + head * args.x_head), {}, nullptr,
                                 product_.row_at(rounded_rows(head, args.m), row), thread);
      });
}

PackedProduct::Task CpuHeads::head_task(const HeadsArgs& args, int64_t head) const {
  PackedProduct::Task task;
  task.rows = rounded_rows(head, args.m);
  task.end = args.m;
  task.output = {.y = args.y.at(head * args.y_head), .stride = args.y_stride};
  if (product_.rounder().reads_as_given(args.x.type, {})) {
    task.floats = args.x.f32() + head * args.x_head;
    task.floats_stride = args.x_stride;
  }
  return task;
}

void CpuHeads::multiply(const HeadsArgs& args) {
  const int64_t heads = std::ssize(matrices_);
  const int64_t tiles = matrices_.front().tiles();
  const int64_t units = ceil_div(tiles, kUnit);  // of a head
  const int64_t chunks =
      std::min(heads * units, int64_t{workspace_.pool().threads()} * kChunksPerThread);
  workspace_.pool().parallel_for(chunks, [&](int64_t chunk, int thread) {
    const int64_t end = heads * units * (chunk + 1) / chunks;
    for (int64_t unit = heads * units * chunk / chunks; unit < end;) {
      const int64_t head = unit / units;
      const int64_t last = std::min(end, (head + 1) * units) - head * units;
      PackedProduct::Task task = head_task(args, head);
      task.thread = thread;
      product_.multiply(matrices_[static_cast<size_t>(head)], task,
                        {(unit - head * units) * kUnit, std::min(tiles, last * kUnit)});
      unit = head * units + last;
    }
  });
}

}  // namespace nibble::cpu
