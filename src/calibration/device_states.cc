#include "calibration/device_states.h"

#include <utility>

namespace nibble {

int64_t DeviceStates::bytes(const Parts& parts, Place place) {
  const int64_t slabs =
      place == Place::kMemory ? parts.windows : int64_t{2} * CalibrationMath::kSlots;
  return slabs * parts.rows * parts.runner.hidden_row_bytes();
}

Result<std::unique_ptr<DeviceStates>> DeviceStates::create(const Parts& parts, Place place) {
  std::unique_ptr<DeviceStates> states(new DeviceStates(parts, place));
  NIBBLE_ASSIGN_OR_RETURN(states->memory_,
                          parts.math.allocate_pinned(static_cast<size_t>(bytes(parts, place))));
  return states;
}

std::span<std::byte> DeviceStates::slab(int64_t window) const { return staged(window); }

Status DeviceStates::fetch(int64_t window) {
  const int slot = slot_of(window);
  parts_.runner.select(slot);
  if (!in_memory()) {
    NIBBLE_RETURN_IF_ERROR(settle(slot));
    NIBBLE_RETURN_IF_ERROR(from_->read(window, staged(slot)));
  }
  parts_.math.fetch(slot, parts_.runner.hidden(), staged(in_memory() ? window : slot));
  return {};
}

Status DeviceStates::enter(int64_t window) {
  const int slot = slot_of(window);
  if (to_be_written(slot)) {  // nothing was fetched, which would have waited
    NIBBLE_RETURN_IF_ERROR(settle(slot));
  }
  parts_.runner.select(slot);
  parts_.math.begin(slot);
  return {};
}

void DeviceStates::leave(int64_t window, Outcome outcome) {
  const int slot = slot_of(window);
  parts_.math.end(slot);
  if (outcome == Outcome::kDropped) {
    return;
  }
  if (in_memory()) {
    parts_.math.store(slot, staged(window), parts_.runner.hidden());
    return;
  }
  parts_.math.store(slot, staged(CalibrationMath::kSlots + slot), parts_.runner.hidden());
  pending_.at(static_cast<size_t>(slot)) = window;
}

Status DeviceStates::settle(int slot) {
  parts_.math.wait(slot);
  const int64_t window = std::exchange(pending_.at(static_cast<size_t>(slot)), kNone);
  return window == kNone ? Status() : to_->write(window, staged(CalibrationMath::kSlots + slot));
}

Status DeviceStates::settle() {
  Status first;
  for (int slot = 0; slot < CalibrationMath::kSlots; ++slot) {
    const Status status = settle(slot);
    first = first.ok() ? status : first;
  }
  return first;
}

}  // namespace nibble
