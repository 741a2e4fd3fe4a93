#include "backend/cuda/cublaslt.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <utility>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/memory.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

Status failure(cublasStatus_t code, std::string_view what) {
  return make_error(StatusCode::kUnavailable, "cuBLASLt {}: error {}", what,
                    static_cast<int>(code));
}

#define NIBBLE_CUBLASLT(expr, what)                                              \
  do {                                                                           \
    const cublasStatus_t nibble_code = (expr);                                   \
    if (nibble_code != CUBLAS_STATUS_SUCCESS) return failure(nibble_code, what); \
  } while (false)

Result<CublasLtApi> load(const char* library) {
  void* handle = nullptr;
  const std::string toolkit = std::string("/usr/local/cuda/lib64/") + library;
  std::string reason;
  for (const char* name : {library, toolkit.c_str()}) {
    handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      break;
    }
    const char* text = dlerror();
    reason += reason.empty() ? "" : "; ";
    reason += text != nullptr ? text : "not found";
  }
  if (handle == nullptr) {
    return make_error(StatusCode::kUnavailable,
                      "cannot open {} ({}); install cuBLAS of CUDA 13 or put its folder into "
                      "LD_LIBRARY_PATH, or use --device cpu",
                      library, reason);
  }
  CublasLtApi api;
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    missing = function == nullptr ? name : missing;
  };
  find(api.create, "cublasLtCreate");
  find(api.destroy, "cublasLtDestroy");
  find(api.matmul, "cublasLtMatmul");
  find(api.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(api.desc_create, "cublasLtMatmulDescCreate");
  find(api.desc_destroy, "cublasLtMatmulDescDestroy");
  find(api.desc_set, "cublasLtMatmulDescSetAttribute");
  find(api.layout_create, "cublasLtMatrixLayoutCreate");
  find(api.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(api.layout_set, "cublasLtMatrixLayoutSetAttribute");
  find(api.preference_create, "cublasLtMatmulPreferenceCreate");
  find(api.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(api.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  if (missing != nullptr) {
    return make_error(StatusCode::kUnavailable,
                      "{} has no function {}; install cuBLAS of CUDA 13, or use --device cpu",
                      library, missing);
  }
  return api;
}

}  // namespace

Result<const CublasLtApi*> CublasLtApi::open(const char* library) {
  static std::mutex mutex;
  static std::map<std::string, CublasLtApi> opened;  // never closed: kernels may be in flight
  const std::lock_guard lock(mutex);
  auto found = opened.find(library);
  if (found == opened.end()) {
    NIBBLE_ASSIGN_OR_RETURN(const CublasLtApi api, load(library));
    found = opened.emplace(library, api).first;
  }
  return &found->second;
}

int64_t cublaslt_bucket(int64_t m) {
  return static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(m, 1, 8192))));
}

/// Descriptors of one call, with its algorithm. In cuBLAS's column-major terms: yᵀ [n, m] = wᵀᵀ [n,
/// k] · xᵀ [k, m], where wᵀ lies as [k, n]; of w_by_k as [n, k], which is not transposed again.
struct CublasLt::Plan {
  const CublasLtApi& api;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  explicit Plan(const CublasLtApi& functions) : api(functions) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (desc != nullptr) api.desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {w, x, y}) {
      if (layout != nullptr) api.layout_destroy(layout);
    }
  }

  template <typename T>
  Status set(cublasLtMatmulDescAttributes_t attribute, T value) {
    NIBBLE_CUBLASLT(api.desc_set(desc, attribute, &value, sizeof(value)), "descriptor");
    return {};
  }

  Status make(const CublasLtProblem& problem, const void* bias) {
    const auto n = static_cast<uint64_t>(problem.n), k = static_cast<uint64_t>(problem.k);
    const auto m = static_cast<uint64_t>(problem.m);
    const cudaDataType result = problem.f32_result ? CUDA_R_32F : CUDA_R_16BF;
    NIBBLE_CUBLASLT(api.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    NIBBLE_RETURN_IF_ERROR(
        set(CUBLASLT_MATMUL_DESC_TRANSA, problem.w_by_k ? CUBLAS_OP_N : CUBLAS_OP_T));
    if (problem.bias) {
      NIBBLE_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
      NIBBLE_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, result));
      NIBBLE_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
    }
    const cudaDataType operand = problem.fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
    NIBBLE_CUBLASLT(problem.w_by_k ? api.layout_create(&w, operand, n, k, problem.n)
                                   : api.layout_create(&w, operand, k, n, problem.k),
                    "layout");
    NIBBLE_CUBLASLT(
        api.layout_create(&x, operand, k, m, problem.x_stride > 0 ? problem.x_stride : problem.k),
        "layout");
    NIBBLE_CUBLASLT(api.layout_create(&y, result, n, m, problem.y_stride), "layout");
    return problem.batch.count > 1 ? make_batch(problem.batch) : Status();
  }

  Status make_batch(const CublasLtBatch& batch) {
    const auto count = static_cast<int32_t>(batch.count);
    for (const auto& [layout, stride] :
         {std::pair(w, batch.w), std::pair(x, batch.x), std::pair(y, batch.y)}) {
      NIBBLE_CUBLASLT(
          api.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
          "layout");
      NIBBLE_CUBLASLT(api.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                     sizeof(stride)),
                      "layout");
    }
    return {};
  }
};

CublasLt::CublasLt(const CublasLtApi* api, cublasLtHandle_t handle, void* workspace)
    : api_(api), handle_(handle), workspace_(workspace) {}

CublasLt::~CublasLt() {
  plans_.clear();
  api_->destroy(handle_);
  cudaFree(workspace_);
}

void* CublasLt::workspace(cudaStream_t stream) const {
  const std::lock_guard lock(mutex_);
  const auto own = own_.find(stream);
  return own != own_.end() ? own->second.as<void>() : workspace_;
}

void* CublasLt::scratch(cudaStream_t stream) const {
  return static_cast<std::byte*>(workspace(stream)) + kWorkspaceBytes;
}

Status CublasLt::add_stream(cudaStream_t stream) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer memory, allocate_device(kWorkspaceBytes + kScratchBytes,
                                                               "another workspace of cuBLASLt's"));
  const std::lock_guard lock(mutex_);
  own_[stream] = std::move(memory);
  return {};
}

void CublasLt::remove_stream(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  own_.erase(stream);
}

Result<std::shared_ptr<CublasLt>> CublasLt::open(const DeviceInfo& device) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<CublasLt>> made;
  const std::lock_guard lock(mutex);
  if (auto existing = made[device.index].lock()) {
    return existing;
  }
  NIBBLE_ASSIGN_OR_RETURN(const CublasLtApi* api, CublasLtApi::open());
  cublasLtHandle_t handle = nullptr;
  NIBBLE_CUBLASLT(api->create(&handle), "handle");
  void* workspace = nullptr;
  if (const Status status = check(cudaMalloc(&workspace, kWorkspaceBytes + kScratchBytes),
                                  "allocating cuBLASLt's 33 MiB workspace");
      !status.ok()) {
    api->destroy(handle);
    return status;
  }
  std::shared_ptr<CublasLt> created(new CublasLt(api, handle, workspace));
  made[device.index] = created;
  return created;
}

Result<cublasLtMatmulAlgo_t> CublasLt::choose(const CublasLtProblem& problem) {
  CHECK(!problem.w_by_k);
  const int64_t bucket = cublaslt_bucket(problem.m);
  const Key key{bucket,      problem.n, problem.k, problem.y_stride % 8 == 0, problem.f32_result,
                problem.bias};
  const std::lock_guard lock(mutex_);
  if (const auto found = algorithms_.find(key); found != algorithms_.end()) {
    return found->second;
  }
  CublasLtProblem largest = problem;
  largest.m = bucket;
  Plan plan(*api_);
  NIBBLE_RETURN_IF_ERROR(plan.make(largest, workspace_));
  NIBBLE_ASSIGN_OR_RETURN(const cublasLtMatmulAlgo_t algorithm, ask(plan));
  algorithms_[key] = algorithm;
  return algorithm;
}

Result<cublasLtMatmulAlgo_t> CublasLt::ask(const Plan& plan) const {
  cublasLtMatmulPreference_t preference = nullptr;
  NIBBLE_CUBLASLT(api_->preference_create(&preference), "preference");
  const size_t bytes = kWorkspaceBytes;
  cublasStatus_t code = api_->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &bytes, sizeof(bytes));
  const uint32_t alignment = 16;  // the contract of x and y
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    if (code == CUBLAS_STATUS_SUCCESS) {
      code = api_->preference_set(preference, attribute, &alignment, sizeof(alignment));
    }
  }
  cublasLtMatmulHeuristicResult_t best{};
  int count = 0;
  if (code == CUBLAS_STATUS_SUCCESS) {
    code = api_->heuristic(handle_, plan.desc, plan.w, plan.x, plan.y, plan.y, preference, 1, &best,
                           &count);
  }
  api_->preference_destroy(preference);
  NIBBLE_CUBLASLT(code, "heuristic");
  NIBBLE_CUBLASLT(count > 0 ? best.state : CUBLAS_STATUS_NOT_SUPPORTED, "heuristic");
  return best.algo;
}

Status CublasLt::plan(const CublasLtProblem& problem) { return choose(problem).status(); }

Status CublasLt::run(const CublasLtProblem& problem,
                     const CublasLtOperands& args,
                     cudaStream_t stream) {
  Plan plan(*api_);
  NIBBLE_ASSIGN_OR_RETURN(plan.algorithm, choose(problem));
  NIBBLE_RETURN_IF_ERROR(plan.make(problem, args.bias));
  return multiply(plan, args, stream);
}

Status CublasLt::multiply(const Plan& plan,
                          const CublasLtOperands& args,
                          cudaStream_t stream) const {
  const float alpha = 1.0F;
  NIBBLE_CUBLASLT(api_->matmul(handle_, plan.desc, &alpha, args.w, plan.w, args.x, plan.x,
                               &args.beta, args.y, plan.y, args.y, plan.y, &plan.algorithm,
                               workspace(stream), kWorkspaceBytes, stream),
                  "product");
  return {};
}

Result<std::unique_ptr<CublasLt::Plan>> CublasLt::make_plan(const CublasLtProblem& problem) const {
  auto plan = std::make_unique<Plan>(*api_);
  NIBBLE_RETURN_IF_ERROR(plan->make(problem, nullptr));
  NIBBLE_ASSIGN_OR_RETURN(plan->algorithm, ask(*plan));
  return plan;
}

Result<const CublasLt::Plan*> CublasLt::kept_plan(const CublasLtProblem& problem) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Plan>& plan = plans_[problem];
  if (plan == nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(plan, make_plan(problem));
  }
  return plan.get();
}

Status CublasLt::plan_exactly(const CublasLtProblem& problem) {
  CHECK(!problem.bias);
  return kept_plan(problem).status();
}

Status CublasLt::run_exactly(const CublasLtProblem& problem,
                             const CublasLtOperands& args,
                             Planning planning,
                             cudaStream_t stream) {
  CHECK(!problem.bias);
  if (planning == Planning::kKept) {
    NIBBLE_ASSIGN_OR_RETURN(const Plan* plan, kept_plan(problem));
    return multiply(*plan, args, stream);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<Plan> plan, make_plan(problem));
  return multiply(*plan, args, stream);
}

}  // namespace nibble::cuda
