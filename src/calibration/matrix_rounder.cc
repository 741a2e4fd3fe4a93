#include "calibration/matrix_rounder.h"

namespace nibble {

HostRounder::HostRounder(InputSums& sums, Rounding rounding, ThreadPool& pool)
    : sums_(sums), rounding_(rounding), pool_(pool) {
  sums.gram.finish();
  statistics_ =
      make_site_statistics(sums.gram, rounding, pool, sums.drift ? &*sums.drift : nullptr);
}

}  // namespace nibble
