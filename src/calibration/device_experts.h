#pragma once

#include <cstdint>

#include "backend/prepared_experts.h"
#include "calibration/layer_rounder.h"

namespace nibble {

/// What round_experts() does with one of the products of a layer's experts, on a device: the sums
/// of as many experts as find room there are collected in one pass over the windows, and rounded.
/// Errors: kResourceExhausted.
Status round_experts_on_device(const LayerParts& parts, int64_t layer, ExpertPart part);

/// Keeps what down would multiply without rounding (Kept::kFloatExperts), of the experts that
/// tokens choose; these are as the source has them. kResourceExhausted, kIo.
Status record_float_rows_on_device(const LayerParts& parts);

}  // namespace nibble
