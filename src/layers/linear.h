#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "checkpoint/linear_reader.h"
#include "layers/forward_context.h"

namespace nibble {

/// y (+)= x · wᵀ + bias, where w may be several matrices stacked by rows (q, k and v; gate and up):
/// one product when their formats agree, else one per format; rows are normed and rounded once for
/// neighbours that round them alike.
class Linear final {
 public:
  /// Packs the parts, which are not needed afterwards. All have the same k; n is the sum of theirs.
  ///   bias      [n], or empty for none; copied to the backend
  ///   max_rows  largest m of run()
  /// Errors: those of Backend::prepare_gemm, kResourceExhausted.
  static Result<Linear> prepare(std::span<const MappedLinear> parts,
                                std::span<const float> bias,
                                Backend& backend,
                                int64_t max_rows);

  /// PreparedGemm::prepare_branch().
  Status prepare_branch();

  [[nodiscard]] int64_t n() const { return n_; }
  [[nodiscard]] int64_t k() const { return k_; }
  /// What activations are rounded to, of the first part.
  [[nodiscard]] ActFormat act() const { return act_; }
  /// Bytes that one row of activations reads.
  [[nodiscard]] int64_t weight_bytes() const;

  /// x [m, k] (or what args.input says) and y [m, n]: dense where no stride is given. Allocates
  /// nothing.
  void forward(GemmArgs args);
  /// The same within a layer: the context's observer, if there is one, sees the rows first and may
  /// do without the product, which then is not done.
  enum class Done : bool { kNo, kYes };
  Done forward(const GemmArgs& args, const ForwardContext& context);

 private:
  struct Part {
    std::unique_ptr<PreparedGemm> gemm;
    int64_t first_column = 0;  // in y
  };

  Linear() = default;

  [[nodiscard]] int64_t x_stride_of(const GemmArgs& args) const;

  int64_t n_ = 0;
  int64_t k_ = 0;
  ActFormat act_ = ActFormat::kFloat;
  std::vector<Part> parts_;
  DeviceBuffer bias_;
};

}  // namespace nibble
