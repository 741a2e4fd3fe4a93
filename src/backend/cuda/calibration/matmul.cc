#include "backend/cuda/calibration/matmul.h"

#include <initializer_list>
#include <utility>

namespace nibble::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr uint32_t kAlignment = 16;

Status check_blas(cublasStatus_t code, const char* what) {
  return code == CUBLAS_STATUS_SUCCESS
             ? Status()
             : make_error(StatusCode::kUnavailable,
                          "cuBLASLt {}: error {}; calibrate with --device cpu", what,
                          static_cast<int>(code));
}

}  // namespace

/// Descriptors of a shape with their algorithm.
struct Matmul::Plan {
  const CublasLtApi& api;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  explicit Plan(const CublasLtApi& functions) : api(functions) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (desc != nullptr) {
      api.desc_destroy(desc);
    }
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) {
        api.layout_destroy(layout);
      }
    }
  }

  Status describe(const MatmulShape& shape) {
    NIBBLE_RETURN_IF_ERROR(
        check_blas(api.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor"));
    for (const auto& [attribute, transposed] :
         {std::pair(CUBLASLT_MATMUL_DESC_TRANSA, shape.transpose_a),
          std::pair(CUBLASLT_MATMUL_DESC_TRANSB, shape.transpose_b)}) {
      const cublasOperation_t operation = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
      NIBBLE_RETURN_IF_ERROR(
          check_blas(api.desc_set(desc, attribute, &operation, sizeof(operation)), "descriptor"));
    }
    const cudaDataType type = shape.type == MatmulShape::Type::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
    const auto layout = [&](cublasLtMatrixLayout_t& out, cudaDataType of, bool turned,
                            std::pair<int64_t, int64_t> size, int64_t stride) {
      const auto rows = static_cast<uint64_t>(turned ? size.second : size.first);
      const auto columns = static_cast<uint64_t>(turned ? size.first : size.second);
      return check_blas(api.layout_create(&out, of, rows, columns, stride), "layout");
    };
    NIBBLE_RETURN_IF_ERROR(layout(a, type, shape.transpose_a, {shape.m, shape.k}, shape.lda));
    NIBBLE_RETURN_IF_ERROR(layout(b, type, shape.transpose_b, {shape.k, shape.n}, shape.ldb));
    NIBBLE_RETURN_IF_ERROR(layout(c, CUDA_R_32F, false, {shape.m, shape.n}, shape.ldc));
    return shape.batch.count > 1 ? describe_batch(shape.batch) : Status();
  }

  Status describe_batch(const MatmulBatch& batch) {
    const auto count = static_cast<int32_t>(batch.count);
    for (const auto& [layout, stride] :
         {std::pair(a, batch.a), std::pair(b, batch.b), std::pair(c, batch.c)}) {
      NIBBLE_RETURN_IF_ERROR(check_blas(
          api.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
          "layout"));
      NIBBLE_RETURN_IF_ERROR(
          check_blas(api.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                    sizeof(stride)),
                     "layout"));
    }
    return {};
  }

  Status choose(cublasLtHandle_t handle) {
    cublasLtMatmulPreference_t preference = nullptr;
    NIBBLE_RETURN_IF_ERROR(check_blas(api.preference_create(&preference), "preference"));
    cublasStatus_t code = api.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &kWorkspaceBytes, sizeof(kWorkspaceBytes));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      if (code == CUBLAS_STATUS_SUCCESS) {
        code = api.preference_set(preference, attribute, &kAlignment, sizeof(kAlignment));
      }
    }
    cublasLtMatmulHeuristicResult_t best{};
    int count = 0;
    if (code == CUBLAS_STATUS_SUCCESS) {
      code = api.heuristic(handle, desc, a, b, c, c, preference, 1, &best, &count);
    }
    api.preference_destroy(preference);
    NIBBLE_RETURN_IF_ERROR(check_blas(code, "heuristic"));
    NIBBLE_RETURN_IF_ERROR(
        check_blas(count > 0 ? best.state : CUBLAS_STATUS_NOT_SUPPORTED, "heuristic"));
    algorithm = best.algo;
    return {};
  }
};

Matmul::Matmul(const CublasLtApi& api, cudaStream_t stream) : api_(api), stream_(stream) {}

Result<std::unique_ptr<Matmul>> Matmul::create(cudaStream_t stream) {
  NIBBLE_ASSIGN_OR_RETURN(const CublasLtApi* api, CublasLtApi::open());
  std::unique_ptr<Matmul> matmul(new Matmul(*api, stream));
  NIBBLE_RETURN_IF_ERROR(check_blas(api->create(&matmul->handle_), "handle"));
  NIBBLE_ASSIGN_OR_RETURN(matmul->workspace_,
                          allocate_device(kWorkspaceBytes, "cuBLASLt's workspace"));
  return matmul;
}

Matmul::~Matmul() {
  plans_.clear();
  if (handle_ != nullptr) {
    api_.destroy(handle_);
  }
}

Result<const Matmul::Plan*> Matmul::plan_of(const MatmulShape& shape) {
  std::unique_ptr<Plan>& plan = plans_[shape];
  if (plan == nullptr) {
    auto made = std::make_unique<Plan>(api_);
    NIBBLE_RETURN_IF_ERROR(made->describe(shape));
    NIBBLE_RETURN_IF_ERROR(made->choose(handle_));
    plan = std::move(made);
  }
  return static_cast<const Plan*>(plan.get());
}

Status Matmul::run(const MatmulShape& shape, const MatmulOperands& operands) {
  NIBBLE_ASSIGN_OR_RETURN(const Plan* plan, plan_of(shape));
  return check_blas(
      api_.matmul(handle_, plan->desc, &operands.alpha, operands.a, plan->a, operands.b, plan->b,
                  &operands.beta, operands.c, plan->c, operands.c, plan->c, &plan->algorithm,
                  workspace_.as<void>(), kWorkspaceBytes, stream_),
      "product");
}

}  // namespace nibble::cuda
