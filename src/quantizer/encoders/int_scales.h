#pragma once

#include "quant/scheme.h"
#include "quantizer/kernels/row_kernels.h"
#include "quantizer/rtn.h"

namespace nibble {

/// The scale of a group whose weights are all zero, or too small to be divided by: what
/// compressed-tensors stores, 2^-23 in F32 and 2^-7 in BF16.
[[nodiscard]] float zero_scale(DType scale_dtype);
/// Whether a group of this largest magnitude counts as one of zeros.
[[nodiscard]] bool vanishes(float absmax);
/// `scale` as it is stored, made smaller where `steps` times it would be infinite.
[[nodiscard]] float stored_scale(DType scale_dtype, float scale, float steps);

/// The rule that "best" stands for.
[[nodiscard]] ScaleRule resolve_rule(ScaleRule rule, const WeightFormat& format);

/// Scales, as they are stored, of at most kMostGroups groups of integer codes without zero points.
///   rule    a resolved rule for such codes
///   x       [groups, width] finite, absmax [groups]
void int_scales(const rows::RowKernels& kernels,
                const WeightFormat& format,
                ScaleRule rule,
                const rows::SearchArgs& args,
                float* scales);

}  // namespace nibble
