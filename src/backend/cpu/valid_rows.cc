#include "backend/cpu/valid_rows.h"

#include "quant/levels.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kBlock = 64;  // the compiler turns loops of this fixed length into vector code

bool has_nan(const uint8_t* codes, int64_t count) {
  uint8_t found = 0;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) {
      found |= static_cast<uint8_t>((codes[i + j] & 0x7fU) == 0x7fU);
    }
  }
  for (; i < count; ++i) {
    found |= static_cast<uint8_t>((codes[i] & 0x7fU) == 0x7fU);
  }
  return found != 0;
}

}  // namespace

bool is_valid_row(const QuantView& weight, int64_t row, ActFormat act) {
  if (in_two_levels(weight.format, act)) {
    return levels_of(weight, row).channel != 0;
  }
  return weight.format.code != WeightCode::kFp8E4M3 ||
         !has_nan(reinterpret_cast<const uint8_t*>(weight.code_row(row)), weight.k);
}

Status invalid_row(const QuantView& weight, ActFormat act) {
  if (in_two_levels(weight.format, act)) {
    return check_levels(weight);
  }
  return make_error(StatusCode::kCorrupt, "{}: contains NaN; quantize the model again",
                    weight.name);
}

}  // namespace nibble::cpu
