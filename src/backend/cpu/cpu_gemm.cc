#include "backend/cpu/cpu_gemm.h"

#include <algorithm>

#include "base/check.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kChunksPerThread = 4;     // evens out threads that are interrupted
constexpr int64_t kSerialBytes = 16 << 10;  // below, starting a loop costs more than it gains
constexpr int64_t kFewestPanelRows = 64;    // of a task: each expands the weights anew

}  // namespace

CpuGemm::CpuGemm(PackedMatrix matrix,
                 const GemmRequest& request,
                 const TiledProduct& product,
                 const GemmDevice& device)
    : matrix_(std::move(matrix)),
      product_(matrix_, request.act, product, device),
      workspace_(device.workspace),
      max_m_(request.max_m) {}

Result<std::unique_ptr<PreparedGemm>> CpuGemm::create(const GemmRequest& request,
                                                      const TiledProduct& product,
                                                      const GemmDevice& device) {
  CHECK_GT(request.max_m, 0);
  Workspace& workspace = device.workspace;
  NIBBLE_ASSIGN_OR_RETURN(
      PackedMatrix matrix,
      PackedMatrix::create(request.parts, request.problem.act, device.arena, workspace.pool()));
  std::unique_ptr<CpuGemm> gemm(new CpuGemm(std::move(matrix), request, product, device));
  NIBBLE_RETURN_IF_ERROR(workspace.reserve(request.max_m, gemm->matrix_.k()));
  if (gemm->product_.in_tiles(request.max_m)) {
    NIBBLE_RETURN_IF_ERROR(workspace.reserve_tiles());
  }
  return std::unique_ptr<PreparedGemm>(std::move(gemm));
}

Status CpuGemm::update(int64_t first_row, const QuantTensor& rows) {
  NIBBLE_RETURN_IF_ERROR(check_update(
      {.weight = matrix_.format(), .act = matrix_.act(), .n = matrix_.n(), .k = matrix_.k()},
      first_row, view_of(rows)));
  return matrix_.update(first_row, view_of(rows), workspace_.pool());
}

RoundedRows CpuGemm::rounded_rows(int64_t m) const {
  return {.memory = reinterpret_cast<uint8_t*>(workspace_.activations()),
          .scales = workspace_.scales(),
          .sums = workspace_.sums(),
          .m = m};
}

bool CpuGemm::reads_rows_of(const PreparedGemm& other, int64_t m) const {
  const auto* rows = dynamic_cast<const CpuGemm*>(&other);
  return rows != nullptr && product_.rounder().rounds_like(rows->product_.rounder()) &&
         product_.in_tiles(m) == rows->product_.in_tiles(m);
}

void CpuGemm::round_rows(const GemmArgs& args) {
  const int64_t k = matrix_.k();
  CHECK_LE(args.m, max_m_);
  CHECK_GE(args.x_stride, input_width(args.input.kind, k));
  if (product_.rounder().reads_as_given(args.x.type, args.input)) {
    return;
  }
  const RoundedRows rows = rounded_rows(args.m);
  for_rows(workspace_.pool(), args.m, k, [&](int64_t row, int thread) {
    const void* next = row + 1 < args.m ? args.x.at((row + 1) * args.x_stride).data : nullptr;
    product_.rounder().round(args.x.at(row * args.x_stride), args.input, next,
                             product_.row_at(rows, row), thread);
  });
}

void CpuGemm::multiply(const GemmArgs& args) {
  CHECK_LE(args.m, max_m_);
  CHECK_GE(args.y_stride, matrix_.n());
  CHECK(args.y.type == DType::kF32 || args.output == GemmOutput::kStore);
  if (product_.in_tiles(args.m)) {
    multiply_tiles(args);
  } else {
    multiply_rows(args);
  }
}

PackedProduct::Task CpuGemm::whole_task(const GemmArgs& args) const {
  PackedProduct::Task task;
  task.rows = rounded_rows(args.m);
  task.end = args.m;
  task.output = {.y = args.y, .stride = args.y_stride, .mode = args.output, .bias = args.bias};
  if (product_.rounder().reads_as_given(args.x.type, args.input)) {
    task.floats = args.x.f32();
    task.floats_stride = args.x_stride;
  }
  return task;
}

void CpuGemm::multiply_rows(const GemmArgs& args) {
  const PackedProduct::Task task = whole_task(args);
  const int64_t tiles = matrix_.tiles();
  ThreadPool& pool = workspace_.pool();
  const bool serial = matrix_.bytes() * args.m <= kSerialBytes;
  const int64_t chunks = serial ? 1 : std::min(tiles, pool.threads() * kChunksPerThread);
  pool.parallel_for(chunks, [&](int64_t chunk, int) {
    product_.multiply(matrix_, task, {tiles * chunk / chunks, tiles * (chunk + 1) / chunks});
  });
}

void CpuGemm::multiply_tiles(const GemmArgs& args) {
  constexpr int64_t kUnit = 4;  // weight tiles that a kernel likes to take at once
  ThreadPool& pool = workspace_.pool();
  const PackedProduct::Task whole = whole_task(args);
  const int64_t tiles = matrix_.tiles();
  const int64_t units = (tiles + kUnit - 1) / kUnit;
  const int64_t chunks = std::min(units, pool.threads() * kChunksPerThread);
  int64_t panel_rows = kTileSumRows;
  while (panel_rows > kFewestPanelRows && chunks * args.m < 2 * pool.threads() * panel_rows) {
    panel_rows /= 2;  // more cores than weight tiles to share out
  }
  const int64_t panels = (args.m + panel_rows - 1) / panel_rows;
  pool.parallel_for(chunks * panels, [&](int64_t index, int thread) {
    const int64_t chunk = index % chunks;
    PackedProduct::Task task = whole;
    task.first = index / chunks * panel_rows;
    task.end = std::min(args.m, task.first + panel_rows);
    task.thread = thread;
    product_.multiply(
        matrix_, task,
        {units * chunk / chunks * kUnit, std::min(tiles, units * (chunk + 1) / chunks * kUnit)});
  });
}

}  // namespace nibble::cpu
