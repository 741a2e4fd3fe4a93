#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include <cublasLt.h>

#include "backend/cuda/device_info.h"
#include "base/status.h"
#include "core/device_buffer.h"

namespace nibble::cuda {

/// The functions of libcublasLt that we call.
struct CublasLtApi {
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtDestroy) destroy = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&::cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&::cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;

  /// Opens the library by name with dlopen, once per process; it is never linked, so that machines
  /// without it start. kUnavailable, naming the library and the remedy, when it is missing or lacks
  /// a function.
  static Result<const CublasLtApi*> open(const char* library = "libcublasLt.so.13");
};

/// Products of one problem in one call.
struct CublasLtBatch {
  int64_t count = 1;
  int64_t x = 0, w = 0, y = 0;  // elements from one product's to the next's; of x 0: all read one

  auto operator<=>(const CublasLtBatch&) const = default;
};

/// A product y [m, n] = x [m, k] · w [n, k]ᵀ, or x [m, k] · w [k, n].
struct CublasLtProblem {
  int64_t m = 0, n = 0, k = 0;
  int64_t y_stride = 0;
  int64_t x_stride = 0;     // 0: k
  bool f32_result = false;  // y is f32, else bf16
  bool bias = false;        // of the type of y
  bool fp8 = false;         // x and w are E4M3 as they are, else bf16; n and k multiples of 16
  bool w_by_k = false;      // w is [k, n]; bf16 and of run_exactly() alone
  CublasLtBatch batch = {};

  auto operator<=>(const CublasLtProblem&) const = default;
};

struct CublasLtOperands {
  const void* x = nullptr;
  const void* w = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  float beta = 0.0F;
};

/// A handle on one GPU with the workspace that its products share, and the algorithms chosen so
/// far. Products run on one stream at a time, but for those of streams with a workspace of their
/// own.
class CublasLt final {
 public:
  /// Where the plan of a product, its descriptors and its algorithm, comes from.
  enum class Planning : uint8_t {
    kKept,     // made when the problem first occurs
    kRebuilt,  // made for the call, and thrown away
  };

  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;
  static constexpr size_t kScratchBytes = size_t{1} << 20;

  /// The one of this GPU, made at the first call and kept while somebody holds it.
  static Result<std::shared_ptr<CublasLt>> open(const DeviceInfo& device);
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  ~CublasLt();

  /// Chooses the algorithm of a problem, if that has not been done. Host work only.
  Status plan(const CublasLtProblem& problem);
  /// Enqueues the product; plans it first where plan() was not called for its bucket of m.
  /// May be captured. kUnavailable with cuBLAS's code when the library refuses.
  Status run(const CublasLtProblem& problem, const CublasLtOperands& args, cudaStream_t stream);
  /// plan() and run() of a problem without bias whose plan is for it alone, not for a bucket of m.
  Status plan_exactly(const CublasLtProblem& problem);
  Status run_exactly(const CublasLtProblem& problem,
                     const CublasLtOperands& args,
                     Planning planning,
                     cudaStream_t stream);
  /// kScratchBytes for whoever prepares operands on the stream of the product.
  [[nodiscard]] void* scratch(cudaStream_t stream) const;
  /// Gives products on a stream a workspace of their own, while there is such a stream.
  /// kResourceExhausted.
  Status add_stream(cudaStream_t stream);
  void remove_stream(cudaStream_t stream);

 private:
  struct Plan;
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, bool>;

  CublasLt(const CublasLtApi* api, cublasLtHandle_t handle, void* workspace);
  Result<cublasLtMatmulAlgo_t> choose(const CublasLtProblem& problem);
  /// The library's first choice.
  Result<cublasLtMatmulAlgo_t> ask(const Plan& plan) const;
  /// Descriptors with their algorithm.
  Result<std::unique_ptr<Plan>> make_plan(const CublasLtProblem& problem) const;
  Result<const Plan*> kept_plan(const CublasLtProblem& problem);
  Status multiply(const Plan& plan, const CublasLtOperands& args, cudaStream_t stream) const;
  [[nodiscard]] void* workspace(cudaStream_t stream) const;

  const CublasLtApi* api_;
  cublasLtHandle_t handle_;
  void* workspace_;  // kWorkspaceBytes, then kScratchBytes
  mutable std::mutex mutex_;
  std::map<cudaStream_t, DeviceBuffer> own_;  // workspaces
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
  std::map<CublasLtProblem, std::unique_ptr<Plan>> plans_;
};

/// The bucket of m that shares an algorithm: the next power of two, at most 8192.
[[nodiscard]] int64_t cublaslt_bucket(int64_t m);

}  // namespace nibble::cuda
