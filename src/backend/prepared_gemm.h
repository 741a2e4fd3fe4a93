#pragma once

#include <cstdint>
#include <string_view>

#include "backend/gemm_problem.h"
#include "base/status.h"
#include "ops/gemm.h"
#include "quant/quant_tensor.h"
#include "quant/quant_view.h"

namespace nibble {

/// A weight matrix packed for one kernel. Owned by the layer that uses it.
class PreparedGemm {
 public:
  virtual ~PreparedGemm() = default;
  /// Runs one step's product. Allocates nothing.
  void run(const GemmArgs& args) {
    round_rows(args);
    multiply(args);
  }
  /// The first half of run(): makes the rows of args.x what the product reads, normed and rounded.
  /// They are the device's until the next rows are rounded.
  virtual void round_rows(const GemmArgs& args) = 0;
  /// The second half: the product of rows that this product rounded, or another one that it
  /// reads_rows_of(), from the same x, input and m.
  virtual void multiply(const GemmArgs& args) = 0;
  /// Whether m rows that `other`, of the same device, rounded are those that this product reads.
  [[nodiscard]] virtual bool reads_rows_of(const PreparedGemm& other, int64_t m) const = 0;
  /// Makes room for running it in branches of steps (Step::begin_branch()). kResourceExhausted.
  virtual Status prepare_branch() { return {}; }
  /// The weights in canonical form again: packing is invertible.
  [[nodiscard]] virtual Result<QuantTensor> unpack() const = 0;
  /// Replaces rows [first_row, first_row + rows.n) in place: of one of the parts, or all. The
  /// memory stays, and so do the weights when this fails: kInvalidArgument for another format or k,
  /// rows past the last, or scales that the packed form cannot hold; kCorrupt for NaN codes (on
  /// CPUs); kResourceExhausted. Not while a step runs.
  virtual Status update(int64_t first_row, const QuantTensor& rows) = 0;
  [[nodiscard]] virtual std::string_view kernel_name() const = 0;  // "gemm_w4a16_avx512"
  [[nodiscard]] virtual int64_t weight_bytes() const = 0;          // read per run at m = 1
};

/// kInvalidArgument unless rows like `rows`, in the format that the device keeps weights in, may
/// replace those of the prepared product from first_row on: for PreparedGemm::update().
[[nodiscard]] Status check_update(const GemmProblem& prepared,
                                  int64_t first_row,
                                  const QuantView& rows);

}  // namespace nibble
