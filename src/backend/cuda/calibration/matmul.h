#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/memory.h"

namespace nibble::cuda {

/// Products of one shape in one call, and numbers from one's matrices to the next's.
struct MatmulBatch {
  int64_t count = 1;
  int64_t a = 0;
  int64_t b = 0;
  int64_t c = 0;

  auto operator<=>(const MatmulBatch&) const = default;
};

/// A product C [m, n] := alpha op(A) op(B) + beta C as BLAS has it: matrices lie column by column,
/// `lda`, `ldb` and `ldc` numbers apart, op(A) is [m, k] and op(B) [k, n]. C is f32.
struct MatmulShape {
  enum class Type : uint8_t {
    kBf16,  // of A and B; products are exact, sums in f32
    kF32,   // products and sums in f32, no tensor cores
  };

  Type type = Type::kF32;
  bool transpose_a = false;
  bool transpose_b = false;
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t lda = 0;
  int64_t ldb = 0;
  int64_t ldc = 0;
  MatmulBatch batch = {};

  auto operator<=>(const MatmulShape&) const = default;
};

struct MatmulOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  float* c = nullptr;
  float alpha = 1.0F;
  float beta = 0.0F;
};

/// Products of any shape by cuBLASLt's first choice of algorithm, which is kept for each shape:
/// results are the same in every run on one kind of GPU. All pointers are aligned to 16 bytes.
class Matmul final {
 public:
  /// kUnavailable, with the remedy, without cuBLASLt; kResourceExhausted.
  static Result<std::unique_ptr<Matmul>> create(cudaStream_t stream);
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;
  ~Matmul();

  /// Enqueues the product. kUnavailable with cuBLAS's code when the library refuses.
  Status run(const MatmulShape& shape, const MatmulOperands& operands);

 private:
  struct Plan;

  Matmul(const CublasLtApi& api, cudaStream_t stream);
  Result<const Plan*> plan_of(const MatmulShape& shape);

  const CublasLtApi& api_;
  cudaStream_t stream_;
  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_;
  std::map<MatmulShape, std::unique_ptr<Plan>> plans_;
};

}  // namespace nibble::cuda
