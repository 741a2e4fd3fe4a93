#pragma once

#include <cstdint>

#include "backend/cuda/calibration/calibration_work.h"
#include "backend/cuda/calibration/cuda_drift.h"
#include "backend/cuda/calibration/refine_kernels.h"

namespace nibble::cuda {

/// A matrix that was rounded, whose scales and codes are to be bettered. The rest lies in
/// CalibrationWork: weights and values [n, k], scales and zero points [groups, stride].
struct MatrixToRefine {
  const float* h = nullptr;  // [k, k], complete
  int64_t n = 0;
  int64_t k = 0;
  int64_t stride = 0;  // rows, padded to a multiple of 64
  int64_t groups = 0;
  WeightFormat format;
  float damping = 0;  // of the factor, which the diagonal of H lacks
  bool has_zeros = false;
  bool fits_scales = false;
  const CudaDrift* drift = nullptr;  // whose share the loss counts, too; null: none
};

/// What refine() (quantizer/algorithms/refine.h) does, in its order: in turns the scales of a block
/// of columns, then its codes, each given all others. Either is one kernel for all rows; what both
/// change of the gradients of all other columns is one product. While it runs numbers lie column by
/// column in the matrix's order, [k, stride].
class CudaRefiner final {
 public:
  CudaRefiner(CalibrationWork& work, const MatrixToRefine& matrix);
  /// Replaces the values [n, k], and by the fitted scales [n, groups] those that were sent.
  void run();

 private:
  void load();
  void store();
  struct Columns {
    int64_t begin = 0;
    int64_t count = 0;
  };
  [[nodiscard]] RefineBlockArgs block(const Columns& columns, float* changes) const;
  void fit_wide_group(int64_t group);
  void improve(const Columns& columns);
  /// A product of numbers [of.count, stride] and what H has of their columns and those of `on`: it
  /// is added to these of `to` [k, stride] where beta is 1, and replaces them where that is 0.
  struct Product {
    Columns of;
    Columns on;
    const float* numbers = nullptr;
    float* to = nullptr;
    float beta = 1.0F;
  };
  void multiply(const Product& product);

  CalibrationWork& work_;
  MatrixToRefine matrix_;
  int64_t width_;     // of a group
  bool fits_blocks_;  // scales of groups that lie in blocks
  float* values_;     // [k, stride]
  float* gradients_;  // [k, stride]: (H + damping) e of e = w - value and what a drift asks for,
                      // kept up to date
  float* spare_;      // [k, stride]: errors, then steps of wide groups
};

}  // namespace nibble::cuda
