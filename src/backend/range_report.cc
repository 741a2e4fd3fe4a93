#include "backend/range_report.h"

#include "base/log.h"

namespace nibble {

void RangeReport::add(int64_t count) {
  count_ += count;
  if (count_ < next_) {
    return;
  }
  NIBBLE_LOG(kWarning,
             "{} keys and values so far lay far outside of the int4_static cache's ranges and were "
             "clipped; calibrate again (nibble calibrate-kv) on text like this, or choose another "
             "--kv-cache-dtype",
             count_);
  while (next_ <= count_) {
    next_ *= 10;
  }
}

}  // namespace nibble
