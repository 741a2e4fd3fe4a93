#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "backend/calibration_math.h"
#include "base/status.h"
#include "ops/experts.h"
#include "quant/quant_view.h"

namespace nibble {

/// One of the two products of an expert.
enum class ExpertPart : uint8_t { kGateUp, kDown };

/// Rows of a step whose experts read them.
///   x           [m, hidden], rows x_stride elements apart
///   chosen_by   the same in other numbers, by which experts are chosen: x itself, unless rows are
///               to be seen by the experts that other ones chose
struct ExpertView {
  ConstActivations x;
  ConstActivations chosen_by;
  int64_t x_stride = 0;
  int64_t m = 0;
  ExpertPart part = ExpertPart::kGateUp;  // whose rows are shown
};

/// Sees the rows that experts multiply, before they are rounded: what calibration collects.
class ExpertObserver {
 public:
  virtual ~ExpertObserver() = default;
  /// Whether it wants those of this expert.
  [[nodiscard]] virtual bool wants(int32_t expert) const = 0;
  /// The rows of an expert that a step's rows `of` take, ascending.
  ///   rows  [of, k] f32: of gate and up the inputs, of down what the activation makes of those two
  virtual void observe(int32_t expert, std::span<const int64_t> of, const float* rows) = 0;
};

/// The experts of a layer before they are prepared. All have the same shapes, and one form for gate
/// and up and one for down; how rows enter down may differ where ExpertsForm says so. They may be
/// some of those that the router chooses from, numbered first_expert and up: then rows add nothing
/// for others, as one of several devices would do that share them out.
struct ExpertsRequest {
  struct Expert {
    QuantView gate;  // [width, hidden]
    QuantView up;    // [width, hidden]
    QuantView down;  // [hidden, width]
  };
  std::span<const Expert> experts;
  int64_t first_expert = 0;
  ExpertsForm form;
  QuantView router;                     // [all experts, hidden], not quantized
  std::span<const float> router_bias;   // [all experts], or empty
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
  /// y += the experts of each row that are there. Allocates nothing.
  virtual void run(const ExpertArgs& args) = 0;
  /// Shows the rows that run() would multiply, expert by expert in their order. A step may be shown
  /// in several parts, from its first rows on, with all experts of each. Only where the backend's
  /// memory is the host's.
  virtual void show_rows(const ExpertView& view, ExpertObserver& observer);
  /// Adds the same rows, of each expert to the sums in its place; null: none of that expert. Only
  /// where the sums are on the backend's device; view.chosen_by must be view.x.
  virtual void add_rows(const ExpertView& view, std::span<SiteMath* const> sums);
  /// An expert's weights in canonical form again: packing is invertible. Gate's rows come first.
  /// Here and in what follows experts are numbered as in the request.
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
  /// Read for the rows of a step that choose so many different experts, of which as many are there
  /// as of all: theirs, and the router.
  [[nodiscard]] virtual int64_t active_bytes(int64_t experts) const = 0;
};

/// kInvalidArgument or kUnsupported for a request whose parts do not fit each other, naming the
/// matrix: another format, shape or form than the first expert's, or a number of biases that is
/// none of theirs.
[[nodiscard]] Status check_experts(const ExpertsRequest& request);

}  // namespace nibble
