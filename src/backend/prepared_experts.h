#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "ops/experts.h"
#include "quant/quant_view.h"

namespace nibble {

/// One of the two products of an expert.
enum class ExpertPart : uint8_t { kGateUp, kDown };

/// The experts of a layer before they are prepared. All have the same shapes, and one form for gate
/// and up and one for down.
struct ExpertsRequest {
  struct Expert {
    QuantView gate;  // [width, hidden]
    QuantView up;    // [width, hidden]
    QuantView down;  // [hidden, width]
  };
  std::span<const Expert> experts;
  ExpertsForm form;
  QuantView router;                     // [experts, hidden], not quantized
  std::span<const float> router_bias;   // [experts], or empty
  std::span<const float> correction;    // likewise
  std::span<const float> gate_up_bias;  // [experts, 2 width]: gate, then up; or empty
  std::span<const float> down_bias;     // [experts, hidden], or empty
  DType between = DType::kF32;          // Backend::activation_type()
  int64_t max_m = 0;                    // rows of a step at most
};

/// The experts of a layer with their router, packed for one device. Owned by the layer.
class PreparedExperts {
 public:
  virtual ~PreparedExperts() = default;
  /// y += the experts of each row. Allocates nothing.
  virtual void run(const ExpertArgs& args) = 0;
  /// An expert's weights in canonical form again: packing is invertible. Gate's rows come first.
  [[nodiscard]] virtual Result<QuantTensor> unpack(int64_t expert, ExpertPart part) const = 0;
  /// Replaces rows [first_row, first_row + rows.n) of an expert's product in place, under the rules
  /// of PreparedGemm::update().
  virtual Status update(int64_t expert,
                        ExpertPart part,
                        int64_t first_row,
                        const QuantTensor& rows) = 0;
  [[nodiscard]] virtual std::string_view kernel_name() const = 0;  // of gate and up
  /// Whether a record of run() may stand for it: not where its work on the host is what is
  /// measured.
  [[nodiscard]] virtual bool recordable() const { return true; }
  /// Read for the rows of a step that choose so many different experts: theirs, and the router.
  [[nodiscard]] virtual int64_t active_bytes(int64_t experts) const = 0;
};

/// kInvalidArgument or kUnsupported for a request whose parts do not fit each other, naming the
/// matrix: another format, shape or form than the first expert's, or a number of biases that is
/// none of theirs.
[[nodiscard]] Status check_experts(const ExpertsRequest& request);

}  // namespace nibble
