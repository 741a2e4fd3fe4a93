#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/step.h"
#include "base/status.h"
#include "core/device_buffer.h"
#include "quant/scheme.h"

namespace nibble {

/// How the weights of a matrix become values on a device.
///   kZero       all become 0: the error is then what the outputs are
///   kNearest    each the nearest that its scale gives
///   kByColumns  GPTQ, in the order of the site's factor (arXiv 2210.17323)
///   kRefined    the same, then codes and scales bettered in turns as refine() does
///               (quantizer/algorithms/refine.h)
enum class RoundingWay : uint8_t { kZero, kNearest, kByColumns, kRefined };

/// Scales of a matrix [n, k], [n, groups] f32 in the host's memory, as its encoder chose them.
struct MatrixScales {
  WeightFormat format;
  const float* scales = nullptr;
  const float* zeros = nullptr;  // likewise; null without zero points
  bool fits = false;             // kRefined may change scales, too
};

/// What is added to the diagonal of the sums before they are factored: damping to each, after those
/// of 0 became 1 and those below floor became floor.
struct DiagonalDamping {
  double damping = 0;
  double floor = 0;
  bool operator==(const DiagonalDamping&) const = default;
};

/// The inputs of matrices that multiply the same rows: H = X^T X [k, k] f32 in a device's memory,
/// and rounding by it. Calls take effect in their order, beside the steps of the same backend; one
/// site is factored and rounds at a time.
class SiteMath {
 public:
  virtual ~SiteMath() = default;
  [[nodiscard]] virtual int64_t k() const = 0;
  /// Rows that were added.
  [[nodiscard]] virtual int64_t rows() const = 0;

  /// Adds the rows of a step that a product reads, as it rounds them.
  virtual void add(const Step& step, const InputRows& rows) = 0;
  /// Before the first rows: they come with what would enter if nothing in front of the product had
  /// been rounded, its drift (quantizer/algorithms/drift.h). kResourceExhausted.
  virtual Status expect_drift() = 0;
  /// After add() of the rows: `wanted` lies on the device as rows.x does.
  virtual void add_drift(const Step& step, const InputRows& rows, const void* wanted) = 0;
  /// Adds another's sums, times a factor, and its drift where both expect one; counts no rows.
  virtual void add_sums(const SiteMath& other, double factor) = 0;
  /// Completes H after all rows. Returns its diagonal [k]; waits. Sums that are no numbers show
  /// there. May be called again after more sums were added.
  virtual std::vector<float> finish() = 0;

  /// R of ColumnFactor (quantizer/algorithms/factor.h) for the columns in this order [k]; false
  /// when a pivot is not positive. kResourceExhausted.
  virtual Result<bool> factor(std::span<const int32_t> order, const DiagonalDamping& damping) = 0;

  /// After factor(), with a drift: from here on roundings by columns make good for this share of
  /// what it asks for, and errors are distances to the outputs without it, as of DriftError
  /// (quantizer/algorithms/drift_error.h). False, and nothing, where it is no number.
  /// kResourceExhausted.
  virtual Result<bool> solve_drift(float share) = 0;

  /// Takes weights [n, k] from the host. kResourceExhausted.
  virtual Status load(std::span<const float> weights) = 0;
  /// Begins to round what was loaded. Each way once between two calls of take_errors().
  virtual void round(RoundingWay way, const MatrixScales& scales) = 0;
  /// trace(E H E^T) of the errors E of the roundings since the last call, in their order. Waits.
  virtual std::vector<double> take_errors() = 0;
  /// Copies the values [n, k] that the last rounding made to the host. Waits.
  virtual void read_values(std::span<float> out) = 0;
  /// The same of its scales [n, groups], which kRefined may have changed.
  virtual void read_scales(std::span<float> out) = 0;
};

/// Seconds that a device computed, by part.
struct DeviceSeconds {
  double forward = 0;
  double sums = 0;
  double factor = 0;
  double rounding = 0;
};

/// What a calibration computes on a device beside the layers, made by Backend::calibration_math();
/// must not outlive its backend.
class CalibrationMath {
 public:
  virtual ~CalibrationMath() = default;

  /// Sums over rows of k numbers, all 0. kResourceExhausted.
  virtual Result<std::unique_ptr<SiteMath>> make_site(int64_t k, ActFormat act) = 0;
  /// Factors some sites of equal k at once, as SiteMath::factor() does, which then finds what was
  /// made, until the next call or until a site's sums change. kResourceExhausted.
  struct SiteToFactor {
    const SiteMath* site = nullptr;
    std::vector<int32_t> order;  // [k]
    DiagonalDamping damping;
  };
  virtual Status factor_ahead(std::span<const SiteToFactor> sites) = 0;
  /// Bytes on the device that a site's sums, or its factor, take.
  [[nodiscard]] static int64_t site_bytes(int64_t k) { return 4 * k * k; }

  // Copies to and from the device in the order of its work; they wait.
  virtual void upload(void* to, std::span<const std::byte> from) = 0;
  virtual void download(std::span<std::byte> to, const void* from) = 0;

  /// Memory of the host that is copied to and from the device beside its work.
  virtual Result<DeviceBuffer> allocate_pinned(size_t bytes) = 0;

  // Hidden states on their way through the device, in slots that take turns: each is fetched,
  // worked on by steps, and stored. Copies run beside the steps of other slots.
  static constexpr int kSlots = 3;
  /// Begins to copy to the device, when what the slot did before is done.
  virtual void fetch(int slot, void* to, std::span<const std::byte> from) = 0;
  /// Steps from here on are the slot's, and wait for what it fetches, up to end().
  virtual void begin(int slot) = 0;
  virtual void end(int slot) = 0;
  /// Begins to copy to the host, when the slot's steps are done.
  virtual void store(int slot, std::span<std::byte> to, const void* from) = 0;
  /// Waits for all copies of the slot.
  virtual void wait(int slot) = 0;

  /// Since the last call. Waits.
  virtual DeviceSeconds take_seconds() = 0;
};

}  // namespace nibble
