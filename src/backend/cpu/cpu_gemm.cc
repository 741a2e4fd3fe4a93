#include "backend/cpu/cpu_gemm.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/isa.h"
#include "backend/cpu/numbers.h"
#include "base/check.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kChunksPerThread = 4;     // evens out threads that are interrupted
constexpr int64_t kSerialBytes = 16 << 10;  // below, starting a loop costs more than it gains
constexpr int64_t kFewestPanelRows = 64;    // of a task: each expands the weights anew
constexpr float kInt8Max = 127.0F;
constexpr float kFp8Max = 448.0F;
constexpr int64_t kFp8GroupColumns = 128;  // of ActFormat::kFp8Group

bool has_token_scales(ActFormat act) {
  return act == ActFormat::kInt8Token || act == ActFormat::kFp8Token;
}

/// Groups of these sizes have kernels of their own.
bool has_usual_groups(int64_t groups, int64_t group_size) {
  return groups > 1 && (group_size == 32 || group_size == 64 || group_size == 128);
}

/// Groups that blocks of kMaxBlock columns divide, or that divide them.
bool has_whole_blocks(int64_t group_size) {
  return group_size % kStepColumns == 0 &&
         (group_size % kMaxBlock == 0 || kMaxBlock % group_size == 0);
}

bool takes_scales(TiledScales scales, const WeightFormat& format, int64_t k) {
  const int64_t groups = format.groups(k);
  const bool whole_groups = format.scale_per == ScalePer::kBlock || !format.grouped() ||
                            k % format.group_size == 0 || groups == 1;
  switch (scales) {
    case TiledScales::kAny:
      return whole_groups && (groups <= 1 || has_whole_blocks(format.group_size));
    case TiledScales::kChannel:
      return groups == 1;
    case TiledScales::kUsualGroups:
      return whole_groups && has_usual_groups(groups, format.group_size);
  }
  return false;
}

/// Tiles hold int8 and bf16: activations in f32 do not fit, nor groups of unusual sizes.
bool fits_tiles(const PackedWeights& w, ActFormat act) {
  return act != ActFormat::kFloat &&
         (w.groups <= 1 || (has_usual_groups(w.groups, w.group_size) && w.k % w.group_size == 0));
}

/// From this many rows on tiles beat vectors, which fill no more than one row of a tile each.
/// With int4 in groups they win earlier: vectors multiply 16 bits at half the rate of 8, and take
/// long to decode int4 for floats.
int64_t fewest_tile_rows(const PackedWeights& w, WeightCode code, bool fixed) {
  if (code != WeightCode::kInt4 || w.groups <= 1) {
    return 5;
  }
  return fixed ? 3 : 2;
}

}  // namespace

bool TiledProduct::accepts(const GemmProblem& problem, const GemmDevice& device) const {
  const WeightFormat& format = problem.weight;
  return format.code == code && std::ranges::count(acts, problem.act) > 0 &&
         format.zero_points == zero_points && takes_scales(scales, format, problem.k) &&
         !(device.exact && rounding == TiledRounding::kFixed);
}

CpuGemm::CpuGemm(PackedMatrix matrix,
                 const ActSpec& spec,
                 const TiledProduct& product,
                 const GemmDevice& device)
    : matrix_(std::move(matrix)),
      spec_(spec),
      kernels_(device.kernels),
      workspace_(device.workspace),
      fixed_(product.rounding == TiledRounding::kFixed),
      fetch_far_(detect_cpu_features().fetch_far),
      row_kernel_(kernels_.*product.rows),
      name_(fmt::format("{}_{}", product.name, kernels_.name)) {
  const PackedWeights w = matrix_.view();
  if (product.tiles != nullptr && fits_tiles(w, matrix_.act())) {
    tile_kernel_ = kernels_.*product.tiles;
  }
  fewest_tile_rows_ = fewest_tile_rows(w, matrix_.format().code, fixed_);
}

Result<std::unique_ptr<PreparedGemm>> CpuGemm::create(const GemmRequest& request,
                                                      const TiledProduct& product,
                                                      const GemmDevice& device) {
  CHECK_GT(request.max_m, 0);
  Workspace& workspace = device.workspace;
  NIBBLE_ASSIGN_OR_RETURN(
      PackedMatrix matrix,
      PackedMatrix::create(request.parts, request.problem.act, device.arena, workspace.pool()));
  std::unique_ptr<CpuGemm> gemm(new CpuGemm(std::move(matrix), request.act, product, device));
  gemm->max_m_ = request.max_m;
  NIBBLE_RETURN_IF_ERROR(workspace.reserve(request.max_m, gemm->matrix_.k()));
  if (gemm->in_tiles(request.max_m)) {
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

bool CpuGemm::in_tiles(int64_t m) const {
  return tile_kernel_ != nullptr && m >= fewest_tile_rows_;
}

void CpuGemm::fetch_row(const GemmArgs& args, int64_t row) const {
  constexpr int64_t kLine = 64;
  const ConstNumbers given = numbers_of(args.x.at(row * args.x_stride));
  const int64_t bytes =
      input_width(args.input.kind, matrix_.k()) * (given.type == Element::kF32 ? 4 : 2);
  for (int64_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const uint8_t*>(given.data) + at, 0, 2);
  }
}

ConstNumbers CpuGemm::input_row(const GemmArgs& args, int64_t row, float* buffer) const {
  const ConstActivations given = args.x.at(row * args.x_stride);
  if (args.input.kind == GemmInput::Kind::kPlain) {
    return numbers_of(given);
  }
  const bool to_int8 = matrix_.act() == ActFormat::kInt8Token;
  kernels_.make_input({.x = numbers_of(given),
                       .k = matrix_.k(),
                       .input = args.input,
                       .silu = to_int8 ? kSiluOfInt8 : SiluForm{}},
                      buffer);
  return {buffer, Element::kF32};
}

ConstNumbers CpuGemm::specified_row(ConstNumbers row, float* buffer, int thread) const {
  if (spec_.columns == nullptr && spec_.static_scale == 0.0F) {
    return row;
  }
  const float* from = floats_of(row, buffer);
  float* out = spec_.columns == nullptr ? buffer : workspace_.spare_row(thread);
  const float limit = spec_.static_scale * largest_code();
  for (int64_t i = 0; i < matrix_.k(); ++i) {
    const float x = from[spec_.columns == nullptr ? i : (*spec_.columns)[static_cast<size_t>(i)]];
    out[i] = limit == 0.0F || !std::isfinite(x) ? x : std::clamp(x, -limit, limit);
  }
  return {out, Element::kF32};
}

float CpuGemm::largest_code() const {
  return spec_.format == ActFormat::kInt8Token ? kInt8Max : kFp8Max;
}

float CpuGemm::given_largest(ConstNumbers row) const {
  if (spec_.static_scale == 0.0F) {
    return 0.0F;
  }
  const std::span<const float> x(static_cast<const float*>(row.data),
                                 static_cast<size_t>(matrix_.k()));
  const bool finite = std::ranges::all_of(x, [](float value) { return std::isfinite(value); });
  return finite ? spec_.static_scale * largest_code() : 0.0F;  // else it becomes NaN by its own
}

void CpuGemm::round_fp8_groups(const float* x, float* out) const {
  for (int64_t begin = 0; begin < matrix_.k(); begin += kFp8GroupColumns) {
    const int64_t columns = std::min(kFp8GroupColumns, matrix_.k() - begin);
    const float scale = kernels_.quantize_fp8(x + begin, columns, 0.0F, out + begin);
    for (int64_t i = begin; i < begin + columns; ++i) {
      out[i] *= scale;
    }
  }
}

const float* CpuGemm::floats_of(ConstNumbers row, float* buffer) const {
  if (row.type == Element::kF32) {
    return static_cast<const float*>(row.data);
  }
  kernels_.load(row, matrix_.k(), buffer);
  return buffer;
}

int32_t CpuGemm::int8_offset() const {
  const bool both =
      matrix_.act() == ActFormat::kInt8Token && matrix_.format().code == WeightCode::kInt8;
  return both ? kernels_.int8_offset : 0;
}

int64_t CpuGemm::pieces() const {
  const int64_t columns = matrix_.act() == ActFormat::kInt8Token ? 64 : 32;
  return (matrix_.k() + columns - 1) / columns;
}

bool CpuGemm::takes_input_as_given(const GemmArgs& args) const {
  return matrix_.act() == ActFormat::kFloat && spec_.columns == nullptr &&
         args.input.kind == GemmInput::Kind::kPlain && args.x.type == DType::kF32;
}

int64_t CpuGemm::fixed_stride() const {
  const auto groups = matrix_.k() / matrix_.format().group_size;
  return 2 * matrix_.k() + groups * static_cast<int64_t>(sizeof(FixedGroup));
}

int64_t CpuGemm::slab_stride(int64_t m) { return (m + 15) / 16 * kSlabPieces * kTileBytes; }

uint8_t* CpuGemm::tile_row(int64_t row) {
  return reinterpret_cast<uint8_t*>(workspace_.activations()) +
         row / 16 * kSlabPieces * kTileBytes + row % 16 * 64;
}

void CpuGemm::round_row(const GemmArgs& args, int64_t row, int thread) {
  const int64_t k = matrix_.k();
  const ActFormat act = matrix_.act();
  float* buffer = workspace_.row(thread);
  const bool to_int8 = act == ActFormat::kInt8Token;
  const bool more = row + 1 < args.m;
  // Rows of BF16 that are quantized as they are given are fetched while that is done.
  const bool as_given = to_int8 && args.input.kind == GemmInput::Kind::kPlain &&
                        args.x.type == DType::kBF16 && spec_ == ActSpec(act);
  if (more && !as_given) {
    fetch_row(args, row + 1);
  }
  const ConstNumbers x = specified_row(input_row(args, row, buffer), buffer, thread);
  const bool tiles = in_tiles(args.m);
  auto* bytes = reinterpret_cast<uint8_t*>(workspace_.activations());
  if (to_int8) {
    const void* next =
        as_given && more ? numbers_of(args.x.at((row + 1) * args.x_stride)).data : nullptr;
    const Int8RowResult result =
        kernels_.quantize_int8({.x = x,
                                .k = k,
                                .offset = int8_offset(),
                                .largest = given_largest(x),
                                .out = tiles ? tile_row(row) : bytes + row * pieces() * 64,
                                .piece_stride = tiles ? kTileBytes : 64,
                                .slab_stride = tiles ? slab_stride(args.m) : 512,
                                .next = next});
    workspace_.scales()[row] = result.scale;
    workspace_.sums()[row] = result.sum;
    return;
  }
  if (fixed_) {
    const FixedRow fixed{.x = x,
                         .k = k,
                         .group_size = matrix_.format().group_size,
                         .out = tiles ? tile_row(row) : bytes + row * fixed_stride()};
    return tiles ? kernels_.fixed_pieces(fixed, slab_stride(args.m)) : kernels_.round_fixed(fixed);
  }
  if (tiles && act != ActFormat::kFp8Token) {
    kernels_.round_pieces(x, k, tile_row(row), slab_stride(args.m));
    return;
  }
  const float* floats = floats_of(x, buffer);
  float* out = tiles ? buffer : reinterpret_cast<float*>(bytes) + row * k;
  if (act == ActFormat::kFp8Token) {
    workspace_.scales()[row] = kernels_.quantize_fp8(floats, k, given_largest(x), out);
    if (tiles) {
      kernels_.round_pieces({out, Element::kF32}, k, tile_row(row), slab_stride(args.m));
    }
  } else if (act == ActFormat::kFp8Group) {
    round_fp8_groups(floats, out);
  } else if (act == ActFormat::kBf16) {
    kernels_.round_bf16(floats, k, out);
  } else {
    std::copy_n(floats, k, out);
  }
}

ProductTask CpuGemm::product_task(const GemmArgs& args, int64_t row) const {
  ProductTask task;
  task.w = matrix_.view();
  task.w.fetch_far = fetch_far_;
  task.m = args.m - row;
  task.y = numbers_of(args.y.at(row * args.y_stride));
  task.y_stride = args.y_stride;
  task.add = args.output == GemmOutput::kAdd;
  task.bias = args.bias;
  if (has_token_scales(matrix_.act())) {
    task.x_scales = workspace_.scales() + row;
    task.x_sums = workspace_.sums() + row;
  }
  return task;
}

bool CpuGemm::reads_rows_of(const PreparedGemm& other, int64_t m) const {
  const auto* rows = dynamic_cast<const CpuGemm*>(&other);
  if (rows == nullptr || !(spec_ == rows->spec_) || matrix_.k() != rows->matrix_.k() ||
      in_tiles(m) != rows->in_tiles(m) || int8_offset() != rows->int8_offset()) {
    return false;
  }
  return fixed_ == rows->fixed_ &&
         (!fixed_ || matrix_.format().group_size == rows->matrix_.format().group_size);
}

void CpuGemm::round_rows(const GemmArgs& args) {
  const int64_t k = matrix_.k();
  CHECK_LE(args.m, max_m_);
  CHECK_GE(args.x_stride, input_width(args.input.kind, k));
  if (!takes_input_as_given(args)) {
    for_rows(workspace_.pool(), args.m, k,
             [&](int64_t row, int thread) { round_row(args, row, thread); });
  }
}

void CpuGemm::multiply(const GemmArgs& args) {
  CHECK_LE(args.m, max_m_);
  CHECK_GE(args.y_stride, matrix_.n());
  CHECK(args.y.type == DType::kF32 || args.output == GemmOutput::kStore);
  if (in_tiles(args.m)) {
    multiply_tiles(args);
  } else {
    multiply_rows(args);
  }
}

void CpuGemm::multiply_rows(const GemmArgs& args) {
  GemmTask whole;
  whole.x = reinterpret_cast<const float*>(workspace_.activations());
  whole.x_stride = matrix_.k();
  if (takes_input_as_given(args)) {
    whole.x = args.x.f32();
    whole.x_stride = args.x_stride;
  }
  const auto* codes = reinterpret_cast<const uint8_t*>(workspace_.activations());
  whole.xq_stride = fixed_ ? fixed_stride() : pieces() * 64;
  const bool integer = fixed_ || matrix_.act() == ActFormat::kInt8Token;
  const int64_t tiles = matrix_.tiles();
  ThreadPool& pool = workspace_.pool();
  const bool serial = matrix_.bytes() * args.m <= kSerialBytes;
  const int64_t chunks = serial ? 1 : std::min(tiles, pool.threads() * kChunksPerThread);
  pool.parallel_for(chunks, [&](int64_t chunk, int) {
    for (int64_t row = 0; row < args.m; row += kRowPanel) {
      GemmTask task = whole;
      static_cast<ProductTask&>(task) = product_task(args, row);
      task.m = std::min(kRowPanel, args.m - row);
      task.x += integer ? 0 : row * task.x_stride;
      task.xq = codes + row * task.xq_stride;
      row_kernel_(task, tiles * chunk / chunks, tiles * (chunk + 1) / chunks);
    }
  });
}

void CpuGemm::multiply_tiles(const GemmArgs& args) {
  constexpr int64_t kUnit = 4;  // weight tiles that a kernel likes to take at once
  ThreadPool& pool = workspace_.pool();
  const auto* x = reinterpret_cast<const uint8_t*>(workspace_.activations());
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
    const int64_t row = index / chunks * panel_rows;
    TileGemmTask task;
    static_cast<ProductTask&>(task) = product_task(args, row);
    task.m = std::min(panel_rows, task.m);
    task.x = x + row / 16 * kSlabPieces * kTileBytes;
    task.slab_stride = slab_stride(args.m);
    task.x_pieces = pieces();
    task.scratch = workspace_.tile_scratch(thread);
    tile_kernel_(task, units * chunk / chunks * kUnit,
                 std::min(tiles, units * (chunk + 1) / chunks * kUnit));
  });
}

}  // namespace nibble::cpu
