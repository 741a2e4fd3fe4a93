#include "ops/reference/latent_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/f16.h"
#include "ops/reference/int4_line.h"
#include "quant/codec.h"

namespace nibble::reference {
namespace {

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

float largest(const float* values, int64_t count) {
  float most = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, std::fabs(values[i]));
  }
  return most;
}

/// Codes of 8 bits and their scale in f32.
void write_bytes(const KvView& kv, const float* values, std::byte* row, std::byte* params) {
  const bool fp8 = kv.code == KvCode::kFp8;
  const float scale = largest(values, kv.latent_rank) / (fp8 ? kE4M3Max : 127.0F);
  store(params, scale);
  for (int64_t i = 0; i < kv.latent_rank; ++i) {
    const float x = scale > 0.0F ? values[i] / scale : 0.0F;
    const float whole = std::clamp(std::nearbyint(x), -127.0F, 127.0F);
    row[i] = fp8 ? static_cast<std::byte>(encode_e4m3(x))
                 : static_cast<std::byte>(static_cast<int8_t>(whole));
  }
}

/// Groups of codes of 4 bits, each with its line in fp16.
void write_groups(const KvView& kv, const float* values, std::byte* row, std::byte* params) {
  const int64_t group = kv_format(kv.code).latent.group;
  for (int64_t begin = 0; begin < kv.latent_rank; begin += group, params += 4) {
    const int64_t end = std::min(begin + group, kv.latent_rank);
    const FittedLine line = fit_int4(values + begin, end - begin);
    const uint16_t scale = f32_to_f16(static_cast<float>(line.end_scale));
    const uint16_t offset = f32_to_f16(static_cast<float>(line.end_offset));
    store(params, scale);
    store(params + 2, offset);
    for (int64_t i = begin; i < end; ++i) {
      store_code(row, i, code_of(values[i], f16_to_f32(scale), f16_to_f32(offset)));
    }
  }
}

/// A number that is kept without parameters.
double read_plain(KvCode code, const std::byte* row, int64_t d) {
  return code == KvCode::kF32 ? load<float>(row + 4 * d) : bf16_to_f32(load<uint16_t>(row + 2 * d));
}

/// Where a row's parameters begin.
int64_t params_at(const KvView& kv, int64_t slot) {
  return kv.params_offset() + slot * latent_param_bytes(kv.code, kv.latent_rank);
}

}  // namespace

void write_latent(const KvView& kv, std::byte* page, int64_t slot, const float* row) {
  std::byte* to = page + slot * kv.row_bytes();
  const bool coded = kv_format(kv.code).latent.parameters > 0;
  for (int64_t d = coded ? kv.latent_rank : 0; d < kv.head_dim; ++d) {
    if (kv.code == KvCode::kF32) {
      store(to + 4 * d, row[d]);
    } else {
      const int64_t codes = coded ? kv_row_bytes(kv.code, kv.latent_rank) : 0;
      store(to + codes + 2 * (coded ? d - kv.latent_rank : d), f32_to_bf16(row[d]));
    }
  }
  std::byte* params = page + params_at(kv, slot);
  if (coded && kv_format(kv.code).bits == 8) {
    write_bytes(kv, row, to, params);
  } else if (coded) {
    write_groups(kv, row, to, params);
  }
}

double read_latent(const KvView& kv, const std::byte* page, int64_t slot, int64_t d) {
  const std::byte* row = page + slot * kv.row_bytes();
  if (kv_format(kv.code).latent.parameters == 0) {
    return read_plain(kv.code, row, d);
  }
  if (d >= kv.latent_rank) {
    const int64_t codes = kv_row_bytes(kv.code, kv.latent_rank);
    return read_plain(KvCode::kBf16, row + codes, d - kv.latent_rank);
  }
  const std::byte* params = page + params_at(kv, slot);
  switch (kv.code) {
    case KvCode::kInt8:
      return static_cast<double>(static_cast<int8_t>(row[d])) * load<float>(params);
    case KvCode::kFp8:
      return static_cast<double>(decode_e4m3(static_cast<uint8_t>(row[d]))) * load<float>(params);
    case KvCode::kInt4: {
      const std::byte* line = params + d / kv_format(kv.code).latent.group * 4;
      return int4_code(row, d) * static_cast<double>(f16_to_f32(load<uint16_t>(line))) +
             f16_to_f32(load<uint16_t>(line + 2));
    }
    default:
      CHECK_MSG(false, "no latent in {}", kv_code_name(kv.code));
      return 0.0;
  }
}

}  // namespace nibble::reference
