#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/calibration_math.h"
#include "calibration/layer_runner.h"
#include "calibration/state_file.h"

namespace nibble {

/// The hidden states of all windows on their way through a device that runs one pass after the
/// other: copied to and from it beside the steps of other windows. They are kept in the host's
/// memory, or, where that is too small, in files.
class DeviceStates final {
 public:
  struct Parts {
    LayerRunner& runner;
    CalibrationMath& math;
    int64_t windows = 0;
    int64_t rows = 0;  // of each
  };
  enum class Place : uint8_t { kMemory, kFiles };

  /// kUnavailable or kResourceExhausted where page-locked memory cannot be had.
  static Result<std::unique_ptr<DeviceStates>> create(const Parts& parts, Place place);
  /// Bytes of the host that it takes.
  [[nodiscard]] static int64_t bytes(const Parts& parts, Place place);

  [[nodiscard]] bool in_memory() const { return place_ == Place::kMemory; }
  /// Of a window, in memory.
  [[nodiscard]] std::span<std::byte> slab(int64_t window) const;

  /// Before a pass: the files that states come from and go to; null: they do not, or are in memory.
  void begin(const StateFile* from, StateFile* to) {
    from_ = from;
    to_ = to;
  }
  /// Begins to bring a window to the device, in front of enter() of the window before.
  Status fetch(int64_t window);
  /// LayerRunner::hidden() is the window's from here on, up to leave().
  Status enter(int64_t window);
  enum class Outcome : uint8_t { kDropped, kKept };
  /// What becomes of what the window's steps left in hidden().
  void leave(int64_t window, Outcome result);
  /// Waits for all windows.
  Status settle();

 private:
  static constexpr int64_t kNone = -1;

  DeviceStates(const Parts& parts, Place place)
      : parts_(parts),
        place_(place),
        slab_bytes_(static_cast<size_t>(parts.rows * parts.runner.hidden_row_bytes())) {
    pending_.fill(kNone);
  }
  [[nodiscard]] static int slot_of(int64_t window) {
    return static_cast<int>(window % CalibrationMath::kSlots);
  }
  [[nodiscard]] std::span<std::byte> staged(int64_t index) const {
    return {memory_.as<std::byte>() + static_cast<size_t>(index) * slab_bytes_, slab_bytes_};
  }
  /// Waits for the slot; writes what it had to a file.
  Status settle(int slot);
  [[nodiscard]] bool to_be_written(int slot) const {
    return pending_.at(static_cast<size_t>(slot)) != kNone;
  }

  Parts parts_;
  Place place_;
  size_t slab_bytes_;
  DeviceBuffer memory_;  // of all windows; with files two slabs for each slot: in, then out
  const StateFile* from_ = nullptr;
  StateFile* to_ = nullptr;
  std::array<int64_t, CalibrationMath::kSlots> pending_{};  // window to be written; kNone
};

}  // namespace nibble
