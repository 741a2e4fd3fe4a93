#include "backend/cuda/static_ranges.h"

namespace nibble::cuda {

Result<uint32_t*> StaticRanges::counter() {
  if (memory_.size() == 0) {
    NIBBLE_ASSIGN_OR_RETURN(memory_, allocate_pinned(sizeof(uint32_t)));
    *memory_.as<uint32_t>() = 0;
  }
  return memory_.as<uint32_t>();
}

uint32_t StaticRanges::counted() const {
  return memory_.size() == 0 ? 0 : *static_cast<const volatile uint32_t*>(memory_.as<uint32_t>());
}

void StaticRanges::report() {
  const uint32_t now = counted();
  if (now != reported_) {
    warnings_.add(now - reported_);
    reported_ = now;
  }
}

void StaticRanges::forget() { reported_ = counted(); }

}  // namespace nibble::cuda
