#pragma once

#include <span>

#include "backend/prepared_experts.h"

namespace nibble {

/// What prepared experts of a device have beside, so that roundings can make good for what those in
/// front of them have changed (SiteMath::expect_drift()).
class ExpertDrifts {
 public:
  virtual ~ExpertDrifts() = default;
  /// Fills `out` [view.m * top_k, width] in BF16, on the device, with what down multiplies of the
  /// rows view.x, expert by expert in their order: of the experts that view.chosen_by chooses.
  virtual void keep_down_rows(const ExpertView& view, void* out) = 0;
  /// PreparedExperts::add_rows() to sums that expect drifts.
  ///   wanted: on the device, in BF16; of gate and up rows like view.x, of down those that
  ///           keep_down_rows() kept with the same view.chosen_by
  virtual void add_rows_and_drifts(const ExpertView& view,
                                   std::span<SiteMath* const> sums,
                                   const void* wanted) = 0;
};

}  // namespace nibble
