#include "backend/cpu/packing.h"

#include <cstring>

#include "base/check.h"
#include "base/f16.h"

namespace nibble::cpu {
namespace {

constexpr uint32_t kZeroNibbles = 0x88888888U;  // eight codes of value 0
constexpr float kFp8Factor = 256.0F;            // kernels read E4M3 bits as 2^-8 of the value

int64_t code_bytes(WeightCode code) {
  switch (code) {
    case WeightCode::kF32:
      return 4;
    case WeightCode::kF16:
    case WeightCode::kBf16:
      return 2;
    case WeightCode::kInt8:
    case WeightCode::kFp8E4M3:
      return 1;
    case WeightCode::kInt4:
      return 0;  // half a byte: packed by words
  }
  return 0;
}

int64_t step_bytes(WeightCode code) {
  return code == WeightCode::kInt4 ? kTileRows * 4 : kTileRows * kStepColumns * code_bytes(code);
}

/// Four nibbles, one per byte.
uint32_t spread(uint32_t x) {
  x = (x | (x << 8)) & 0x00ff00ffU;
  return (x | (x << 4)) & 0x0f0f0f0fU;
}

uint32_t gather(uint32_t x) {
  x = (x | (x >> 4)) & 0x00ff00ffU;
  return (x | (x >> 8)) & 0xffffU;
}

uint32_t interleave(uint32_t word) { return spread(word & 0xffffU) | spread(word >> 16) << 4; }

uint32_t deinterleave(uint32_t word) {
  return gather(word & 0x0f0f0f0fU) | gather(word >> 4 & 0x0f0f0f0fU) << 16;
}

/// Nibbles of a row's word that lie past k, as a mask.
uint32_t padding_mask(int64_t columns) {
  return columns >= kStepColumns ? 0U : ~0U << (4 * columns);
}

/// Neighbours of k that lie side by side in a lane.
int64_t lane_columns(WeightCode code, ActFormat act) {
  return act == ActFormat::kInt8Token ? 4 : (code == WeightCode::kBf16 ? 2 : 1);
}

/// Element (lane, column) of a step.
int64_t element_index(int64_t lane, int64_t column, int64_t together) {
  return (column / together * kTileRows + lane) * together + column % together;
}

Status check_formats(const WeightFormat& format, ActFormat act, int64_t k) {
  const bool integer = format.code == WeightCode::kInt8 || format.code == WeightCode::kInt4;
  const bool grouped = format.scale_per == ScalePer::kGroup && format.group_size != k;
  if (act == ActFormat::kInt8Token && (!integer || format.groups(k) != 1)) {
    return make_error(StatusCode::kUnsupported,
                      "int8 activations need int8 or int4 weights with one scale per output "
                      "channel; quantize to one of these, or run with float activations");
  }
  if (act == ActFormat::kFp8Token &&
      (format.code != WeightCode::kFp8E4M3 || format.groups(k) != 1)) {
    return make_error(StatusCode::kUnsupported,
                      "fp8 activations need fp8 weights with one scale per output channel; "
                      "quantize to these, or run with float activations");
  }
  const int group = format.group_size;
  if (grouped &&
      (group % kStepColumns != 0 || (group % kMaxBlock != 0 && kMaxBlock % group != 0))) {
    return make_error(StatusCode::kUnsupported,
                      "group size {}: this backend takes 8, 16, 32 and multiples of 32", group);
  }
  return {};
}

bool scales_fit_bf16(const QuantTensor& weight) {
  for (const float scale : weight.scales.as<float>()) {
    if (bf16_to_f32(f32_to_bf16(scale)) != scale) {
      return false;
    }
  }
  return true;
}

}  // namespace

Result<PackedMatrix> PackedMatrix::create(const QuantTensor& weight,
                                          ActFormat act,
                                          ThreadPool& pool) {
  NIBBLE_RETURN_IF_ERROR(check_formats(weight.format, act, weight.k));
  PackedMatrix packed;
  packed.format_ = weight.format;
  packed.act_ = act;
  packed.n_ = weight.n;
  packed.k_ = weight.k;
  packed.scale_factor_ = weight.format.code == WeightCode::kFp8E4M3 ? kFp8Factor : 1.0F;
  packed.bf16_scales_ = weight.format.scale_dtype == DType::kBF16 && scales_fit_bf16(weight);
  const int64_t code_size = packed.tiles() * packed.steps() * step_bytes(weight.format.code);
  NIBBLE_ASSIGN_OR_RETURN(packed.codes_, Buffer::allocate(static_cast<size_t>(code_size)));
  const int64_t scales = packed.tiles() * kTileRows * weight.format.groups(weight.k);
  const int64_t scale_bytes = scales * (packed.bf16_scales_ ? 2 : 4);
  NIBBLE_ASSIGN_OR_RETURN(packed.scales_, Buffer::allocate(static_cast<size_t>(scale_bytes)));
  if (act == ActFormat::kInt8Token && weight.format.code == WeightCode::kInt8) {
    const int64_t sums = packed.tiles() * kTileRows * 4;
    NIBBLE_ASSIGN_OR_RETURN(packed.row_sums_, Buffer::allocate(static_cast<size_t>(sums)));
  }
  NIBBLE_RETURN_IF_ERROR(packed.pack(weight, pool));
  return packed;
}

Status PackedMatrix::pack(const QuantTensor& weight, ThreadPool& pool) {
  CHECK(weight.format == format_);
  CHECK_EQ(weight.n, n_);
  CHECK_EQ(weight.k, k_);
  CHECK_EQ(weight.codes.size(), static_cast<size_t>(n_ * weight.row_bytes()));
  CHECK_EQ(weight.scales.size(), static_cast<size_t>(n_ * format_.groups(k_)) * 4);
  if (bf16_scales_ && !scales_fit_bf16(weight)) {
    return make_error(StatusCode::kInvalidArgument,
                      "weight scales are not representable in BF16, in which this matrix [{}, {}] "
                      "keeps them; round them first",
                      n_, k_);
  }
  if (format_.code == WeightCode::kFp8E4M3) {
    for (const uint8_t code : weight.codes.as<uint8_t>()) {
      if ((code & 0x7fU) == 0x7fU) {
        return make_error(StatusCode::kCorrupt,
                          "fp8 weights [{}, {}] contain NaN; quantize the model again", n_, k_);
      }
    }
  }
  pool.parallel_for(tiles(), [&](int64_t tile, int) { pack_tile(weight, tile); });
  return {};
}

void PackedMatrix::pack_tile(const QuantTensor& weight, int64_t tile) {
  const int64_t tile_bytes = steps() * step_bytes(format_.code);
  auto* out = reinterpret_cast<uint8_t*>(codes_.data()) + tile * tile_bytes;
  const bool words = format_.code == WeightCode::kInt4;
  const int64_t together = lane_columns(format_.code, act_);
  const int64_t size = code_bytes(format_.code);
  const int64_t groups = format_.groups(k_);
  for (int64_t lane = 0; lane < kTileRows; ++lane) {
    const int64_t row = tile * kTileRows + lane;
    const bool real = row < n_;
    const auto* codes = reinterpret_cast<const uint8_t*>(weight.codes.data()) +
                        (real ? row : 0) * weight.row_bytes();
    int32_t sum = 0;
    for (int64_t step = 0; step < steps(); ++step) {
      uint8_t* target = out + step * step_bytes(format_.code);
      if (words) {
        uint32_t word = kZeroNibbles;
        if (real) {
          std::memcpy(&word, codes + step * 4, 4);
          const uint32_t mask = padding_mask(k_ - step * kStepColumns);
          word = (word & ~mask) | (kZeroNibbles & mask);
        }
        word = interleave(word);
        std::memcpy(target + lane * 4, &word, 4);
        continue;
      }
      for (int64_t c = 0; c < kStepColumns; ++c) {
        const int64_t column = step * kStepColumns + c;
        uint8_t* element = target + element_index(lane, c, together) * size;
        if (real && column < k_) {
          std::memcpy(element, codes + column * size, static_cast<size_t>(size));
          sum += static_cast<int8_t>(codes[column * size]);
        } else {
          std::memset(element, 0, static_cast<size_t>(size));
        }
      }
    }
    if (row_sums_.size() != 0) {
      row_sums_.as<int32_t>()[static_cast<size_t>(row)] = sum;
    }
    for (int64_t g = 0; g < groups; ++g) {
      const float scale =
          real ? weight.scales.as<float>()[static_cast<size_t>(row * groups + g)] : 0.0F;
      const auto index = static_cast<size_t>((tile * groups + g) * kTileRows + lane);
      if (bf16_scales_) {
        scales_.as<uint16_t>()[index] = f32_to_bf16(scale * scale_factor_);
      } else {
        scales_.as<float>()[index] = scale * scale_factor_;
      }
    }
  }
}

float PackedMatrix::packed_scale(int64_t index) const {
  const auto i = static_cast<size_t>(index);
  return (bf16_scales_ ? bf16_to_f32(scales_.as<uint16_t>()[i]) : scales_.as<float>()[i]) /
         scale_factor_;
}

Result<QuantTensor> PackedMatrix::unpack() const {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, QuantTensor::allocate(format_, n_, k_));
  for (int64_t tile = 0; tile < tiles(); ++tile) {
    unpack_tile(weight, tile);
  }
  return weight;
}

void PackedMatrix::unpack_tile(QuantTensor& weight, int64_t tile) const {
  const int64_t tile_bytes = steps() * step_bytes(format_.code);
  const auto* source = reinterpret_cast<const uint8_t*>(codes_.data()) + tile * tile_bytes;
  const int64_t together = lane_columns(format_.code, act_);
  const int64_t size = code_bytes(format_.code);
  const int64_t groups = format_.groups(k_);
  for (int64_t lane = 0; lane < kTileRows && tile * kTileRows + lane < n_; ++lane) {
    const int64_t row = tile * kTileRows + lane;
    auto* codes = reinterpret_cast<uint8_t*>(weight.codes.data()) + row * weight.row_bytes();
    for (int64_t step = 0; step < steps(); ++step) {
      const uint8_t* from = source + step * step_bytes(format_.code);
      if (format_.code == WeightCode::kInt4) {
        uint32_t word = 0;
        std::memcpy(&word, from + lane * 4, 4);
        word = deinterleave(word) & ~padding_mask(k_ - step * kStepColumns);
        std::memcpy(codes + step * 4, &word, 4);
        continue;
      }
      for (int64_t c = 0; c < kStepColumns && step * kStepColumns + c < k_; ++c) {
        std::memcpy(codes + (step * kStepColumns + c) * size,
                    from + element_index(lane, c, together) * size, static_cast<size_t>(size));
      }
    }
    for (int64_t g = 0; g < groups; ++g) {
      weight.scales.as<float>()[static_cast<size_t>(row * groups + g)] =
          packed_scale((tile * groups + g) * kTileRows + lane);
    }
  }
}

PackedWeights PackedMatrix::view() const {
  PackedWeights view;
  view.codes = reinterpret_cast<const uint8_t*>(codes_.data());
  view.tile_bytes = steps() * step_bytes(format_.code);
  view.scales = scales_.data();
  view.scales_are_bf16 = bf16_scales_;
  view.n = n_;
  view.k = k_;
  view.groups = format_.groups(k_);
  view.group_size = format_.scale_per == ScalePer::kGroup ? format_.group_size : k_;
  view.block = view.group_size < kMaxBlock && view.group_size < k_ ? view.group_size : kMaxBlock;
  view.row_sums = reinterpret_cast<const int32_t*>(row_sums_.data());
  return view;
}

int64_t PackedMatrix::bytes() const {
  return static_cast<int64_t>(codes_.size() + scales_.size() + row_sums_.size());
}

}  // namespace nibble::cpu
