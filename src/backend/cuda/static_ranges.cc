#include "backend/cuda/static_ranges.h"

namespace nibble::cuda {

Result<uint32_t*> StaticRanges::counter() {
  if (memory_.size() == 0) {
    NIBBLE_ASSIGN_OR_RETURN(memory_, allocate_pinned(sizeof(uint32_t)));
    *memory_.as<uint32_t>() = 0;
  }
  return memory_.as<uint32_t>();
}

void StaticRanges::report() {
  if (memory_.size() == 0) {
    return;
  }
  const uint32_t counted = *static_cast<const volatile uint32_t*>(memory_.as<uint32_t>());
  if (counted != reported_) {
    warnings_.add(counted - reported_);
    reported_ = counted;
  }
}

}  // namespace nibble::cuda
