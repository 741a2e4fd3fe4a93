#include "calibration/matrix_rounder.h"

namespace nibble {

HostRounder::HostRounder(InputSums& sums, Rounding rounding, ThreadPool& pool, PartTimes& times)
    : sums_(sums), rounding_(rounding), pool_(pool), times_(times) {
  times.time(CalibrationPart::kFactor, [&] {
    sums.gram.finish();
    statistics_ =
        make_site_statistics(sums.gram, rounding, pool, sums.drift ? &*sums.drift : nullptr);
  });
}

}  // namespace nibble
