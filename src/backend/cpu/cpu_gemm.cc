#include "backend/cpu/cpu_gemm.h"

#include <algorithm>

#include "base/check.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kRowPanel = 64;        // rows of x that stay in the second-level cache
constexpr int64_t kChunksPerThread = 4;  // evens out threads that are interrupted
constexpr int64_t kSerialElements = 16 << 10;
constexpr int64_t kSerialBytes = 16 << 10;  // below, starting a loop costs more than it gains

bool has_token_scales(ActFormat act) {
  return act == ActFormat::kInt8Token || act == ActFormat::kFp8Token;
}

KernelTable::Gemm kernel_for(const KernelTable& kernels, WeightCode code, ActFormat act) {
  const bool integer = act == ActFormat::kInt8Token;
  switch (code) {
    case WeightCode::kF32:
      return kernels.gemm_f32;
    case WeightCode::kF16:
      return kernels.gemm_f16;
    case WeightCode::kBf16:
      return kernels.gemm_bf16;
    case WeightCode::kInt8:
      return integer ? kernels.gemm_int8_int8 : kernels.gemm_int8;
    case WeightCode::kFp8E4M3:
      return kernels.gemm_fp8;
    case WeightCode::kInt4:
      return integer ? kernels.gemm_int4_int8 : kernels.gemm_int4;
  }
  return nullptr;
}

std::string_view product_name(WeightCode code, ActFormat act) {
  const bool quantized = has_token_scales(act);
  switch (code) {
    case WeightCode::kF32:
      return "gemm_f32";
    case WeightCode::kF16:
      return "gemm_f16";
    case WeightCode::kBf16:
      return "gemm_bf16";
    case WeightCode::kInt8:
      return quantized ? "gemm_w8a8_int8" : "gemm_w8a16_int8";
    case WeightCode::kFp8E4M3:
      return quantized ? "gemm_w8a8_fp8" : "gemm_w8a16_fp8";
    case WeightCode::kInt4:
      return quantized ? "gemm_w4a8" : "gemm_w4a16";
  }
  return {};
}

}  // namespace

CpuGemm::CpuGemm(PackedMatrix matrix, const KernelTable& kernels, ThreadPool& pool)
    : matrix_(std::move(matrix)),
      kernels_(kernels),
      pool_(pool),
      kernel_(kernel_for(kernels, matrix_.format().code, matrix_.act())),
      name_(
          fmt::format("{}_{}", product_name(matrix_.format().code, matrix_.act()), kernels.name)) {}

Result<std::unique_ptr<PreparedGemm>> CpuGemm::create(std::span<const QuantView> parts,
                                                      ActFormat act,
                                                      int64_t max_m,
                                                      const KernelTable& kernels,
                                                      BufferArena& arena,
                                                      ThreadPool& pool) {
  CHECK_GT(max_m, 0);
  NIBBLE_ASSIGN_OR_RETURN(PackedMatrix matrix, PackedMatrix::create(parts, act, arena, pool));
  std::unique_ptr<CpuGemm> gemm(new CpuGemm(std::move(matrix), kernels, pool));
  NIBBLE_RETURN_IF_ERROR(gemm->allocate_workspace(max_m));
  return std::unique_ptr<PreparedGemm>(std::move(gemm));
}

Status CpuGemm::allocate_workspace(int64_t max_m) {
  max_m_ = max_m;
  if (matrix_.act() == ActFormat::kFloat) {
    return {};
  }
  padded_k_ = (matrix_.k() + 63) / 64 * 64;
  const int64_t element = matrix_.act() == ActFormat::kInt8Token ? 1 : 4;
  NIBBLE_ASSIGN_OR_RETURN(activations_,
                          Buffer::allocate(static_cast<size_t>(max_m * padded_k_ * element)));
  NIBBLE_ASSIGN_OR_RETURN(act_scales_, Buffer::allocate(static_cast<size_t>(max_m * 4)));
  NIBBLE_ASSIGN_OR_RETURN(act_sums_, Buffer::allocate(static_cast<size_t>(max_m * 4)));
  return {};
}

Status CpuGemm::update(const QuantTensor& weight) {
  if (!(weight.format == matrix_.format()) || weight.n != matrix_.n() || weight.k != matrix_.k()) {
    return make_error(StatusCode::kInvalidArgument,
                      "new weights [{}, {}] differ in format or shape from the [{}, {}] in use; "
                      "quantize them with the model's scheme",
                      weight.n, weight.k, matrix_.n(), matrix_.k());
  }
  return matrix_.update(view_of(weight), pool_);
}

void CpuGemm::round_activations(const GemmArgs& args) {
  QuantizeTask task;
  task.x = args.x;
  task.x_stride = args.x_stride;
  task.k = matrix_.k();
  task.out = activations_.data();
  task.out_stride = padded_k_;
  task.offset = matrix_.format().code == WeightCode::kInt8 ? 128 : 0;
  task.scales = act_scales_.as<float>().data();
  task.sums = act_sums_.as<int32_t>().data();
  const auto round = matrix_.act() == ActFormat::kBf16        ? kernels_.round_bf16
                     : matrix_.act() == ActFormat::kInt8Token ? kernels_.quantize_int8
                                                              : kernels_.quantize_fp8;
  if (args.m * task.k <= kSerialElements) {
    for (int64_t row = 0; row < args.m; ++row) {
      round(task, row);
    }
    return;
  }
  pool_.parallel_for(args.m, [&](int64_t row, int) { round(task, row); });
}

void CpuGemm::run(const GemmArgs& args) {
  CHECK_LE(args.m, max_m_);
  CHECK_GE(args.x_stride, matrix_.k());
  CHECK_GE(args.y_stride, matrix_.n());
  GemmTask whole;
  whole.w = matrix_.view();
  whole.x = args.x;
  whole.x_stride = args.x_stride;
  whole.y = args.y;
  whole.y_stride = args.y_stride;
  whole.add = args.output == GemmOutput::kAdd;
  if (matrix_.act() != ActFormat::kFloat) {
    round_activations(args);
    whole.x = activations_.as<float>().data();
    whole.x_stride = padded_k_;
    whole.xq = activations_.as<uint8_t>().data();
    whole.xq_stride = padded_k_;
  }
  const bool scaled = has_token_scales(matrix_.act());
  const int64_t tiles = matrix_.tiles();
  const bool serial = matrix_.bytes() * args.m <= kSerialBytes;
  const int64_t chunks = serial ? 1 : std::min(tiles, pool_.threads() * kChunksPerThread);
  pool_.parallel_for(chunks, [&](int64_t chunk, int) {
    for (int64_t row = 0; row < args.m; row += kRowPanel) {
      GemmTask task = whole;
      task.m = std::min(kRowPanel, args.m - row);
      task.y += row * task.y_stride;
      task.x += matrix_.act() == ActFormat::kInt8Token ? 0 : row * task.x_stride;
      if (scaled) {
        task.xq += row * task.xq_stride;
        task.x_scales = act_scales_.as<float>().data() + row;
        task.x_sums = act_sums_.as<int32_t>().data() + row;
      }
      kernel_(task, tiles * chunk / chunks, tiles * (chunk + 1) / chunks);
    }
  });
}

}  // namespace nibble::cpu
