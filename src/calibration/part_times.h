#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "base/json.h"

namespace nibble {

/// What a calibration's time goes to.
enum class CalibrationPart : uint8_t {
  kForward,   // the layers
  kSums,      // of products of the rows that enter a site
  kStates,    // hidden states from and to where they are kept, as far as others wait for it
  kLoad,      // weights: for the layers, and to be rounded
  kFactor,    // of the sums
  kScales,    // their choice, on a device; hosts count it to the rounding
  kRounding,  // to codes, with the errors of outputs
  kEncode,    // encoding, hashing and writing
};
inline constexpr size_t kCalibrationParts = 8;

/// Seconds by part, of the layer that runs and of all so far.
class PartTimes final {
 public:
  using Clock = std::chrono::steady_clock;

  void add(CalibrationPart part, double seconds) {
    layer_.at(static_cast<size_t>(part)) += seconds;
  }
  /// Of the layer so far.
  [[nodiscard]] double seconds(CalibrationPart part) const {
    return layer_.at(static_cast<size_t>(part));
  }
  /// Adds what work() takes to a part; returns what it returns.
  template <typename Work>
  auto time(CalibrationPart part, const Work& work) {
    const Scope scope(*this, part);
    return work();
  }
  /// Ends a layer: says in the log what it took.
  void finish_layer(int64_t layer);
  /// {"layers", "total", and each part}: seconds of all layers so far.
  [[nodiscard]] Json json() const;

 private:
  struct Scope {
    Scope(PartTimes& to, CalibrationPart of) : times(to), part(of) {}
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { times.add(part, std::chrono::duration<double>(Clock::now() - begin).count()); }

    PartTimes& times;
    CalibrationPart part;
    Clock::time_point begin = Clock::now();
  };

  std::array<double, kCalibrationParts> layer_{};
  std::array<double, kCalibrationParts> all_{};
  Clock::time_point begin_ = Clock::now();  // of the layer
  double total_ = 0;
  int64_t layers_ = 0;
};

}  // namespace nibble
