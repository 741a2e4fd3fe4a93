#pragma once

#include <random>

#include "quant/levels.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// Of formats that products with INT8 activations take, in groups: scales and zero points in two
/// levels, of which every one occurs. Others are left as they are.
template <typename Random>
void make_levels(QuantTensor& weight, Random& random) {
  const WeightFormat& format = weight.format;
  if (format.code != WeightCode::kInt4 || format.scale_per != ScalePer::kGroup ||
      format.scale_dtype != DType::kBF16 || format.zero_points != ZeroPoints::kPerScale) {
    return;
  }
  const auto groups = static_cast<size_t>(format.groups(weight.k));
  for (size_t i = 0; i < weight.scales.as<float>().size(); ++i) {
    const auto channel = static_cast<float>(8 + i / groups % 8) * 0x1p-13F;  // of four bits
    const int zero = static_cast<int>(random() % 16) + kLowestCode;
    const auto steps = static_cast<unsigned>(most_step(zero));
    weight.scales.as<float>()[i] = static_cast<float>(1 + random() % steps) * channel;
    weight.zeros.as<int8_t>()[i] = static_cast<int8_t>(zero);
  }
}

}  // namespace nibble
