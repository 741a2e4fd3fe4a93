#include "bench/kernels/random_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "base/f16.h"
#include "quant/testing/random_levels.h"

namespace nibble {

namespace {

void fill_with_random_bytes(Buffer& buffer, std::mt19937_64& random) {
  std::byte* bytes = buffer.data();
  for (size_t i = 0; i < buffer.size(); i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes + i, &word, std::min<size_t>(8, buffer.size() - i));
  }
}

/// Replaces random codes that a weight does not have.
void make_canonical(QuantTensor& weight) {
  auto* bytes = reinterpret_cast<uint8_t*>(weight.codes.data());
  if (weight.format.code == WeightCode::kBf16) {
    for (uint16_t& value : weight.codes.as<uint16_t>()) {
      value = static_cast<uint16_t>((value & 0x807fU) | 0x3c80U);  // magnitudes 2^-6 to 2^-5
    }
  } else if (weight.format.code == WeightCode::kFp8E4M3) {
    for (size_t i = 0; i < weight.codes.size(); ++i) {
      bytes[i] &= (bytes[i] & 0x7fU) == 0x7fU ? 0xbfU : 0xffU;  // not the NaN
    }
  } else if (weight.format.code == WeightCode::kInt4) {
    const int64_t row = weight.row_bytes();
    for (int64_t n = 0; n < weight.n; ++n) {
      for (int64_t k = weight.k; k < row * 2; ++k) {
        bytes[n * row + k / 2] &= k % 2 == 0 ? 0xf0U : 0x0fU;
      }
    }
  }
}

/// Random numbers around 0.01; for exponents a power of two.
void fill_scales(QuantTensor& weight, std::mt19937_64& random) {
  const WeightFormat& format = weight.format;
  std::uniform_real_distribution<float> scale(0.005F, 0.015F);
  const auto scales = weight.scales.as<float>();
  for (float& value : scales) {
    value =
        format.scale_dtype == DType::kF8E8M0 ? 0x1p-7F : bf16_to_f32(f32_to_bf16(scale(random)));
  }
  if (format.scale_per == ScalePer::kTensor) {
    std::ranges::fill(scales, scales.front());
  } else if (format.scale_per == ScalePer::kBlock) {
    const auto groups = static_cast<size_t>(format.groups(weight.k));
    const auto block = static_cast<size_t>(format.group_size);
    for (size_t row = 0; row < static_cast<size_t>(weight.n); ++row) {
      if (row % block != 0) {  // as the row above
        std::ranges::copy(scales.subspan((row - 1) * groups, groups),
                          scales.begin() + static_cast<int64_t>(row * groups));
      }
    }
  }
  for (float& value : weight.minimums.as<float>()) {
    value = -8 * bf16_to_f32(f32_to_bf16(scale(random)));
  }
}

}  // namespace

Result<QuantTensor> random_weight(const WeightFormat& format, int64_t n, int64_t k, uint64_t seed) {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, QuantTensor::allocate(format, n, k));
  std::mt19937_64 random(seed);
  fill_with_random_bytes(weight.codes, random);
  make_canonical(weight);
  fill_scales(weight, random);
  for (int8_t& zero : weight.zeros.as<int8_t>()) {
    zero = static_cast<int8_t>(static_cast<int>(random() % 16) - 8);  // a code of 4 bits or more
  }
  make_levels(weight, random);
  return weight;
}

ActSpec bench_act(const QuantScheme& scheme, int64_t k, double low_share) {
  ActSpec act = scheme.act == ActFormat::kFloat ? ActFormat::kBf16 : scheme.act;
  if (!in_blocks(scheme.act)) {
    return act;
  }
  BlockPrecision blocks;
  blocks.block = scheme.weight.grouped() ? scheme.weight.group_size : blocks.block;
  const int64_t count = k / blocks.block;
  const uint8_t low = low_bits(block_scales_of(scheme.weight, scheme.act));
  int64_t wider = 0;
  for (int64_t i = 1; i <= count; ++i) {
    const auto due = std::llround((1.0 - low_share) * static_cast<double>(i));
    blocks.bits.push_back(due > wider ? static_cast<uint8_t>(2 * low) : low);
    wider = due;
  }
  act.blocks = std::make_shared<const BlockPrecision>(std::move(blocks));
  return act;
}

}  // namespace nibble
