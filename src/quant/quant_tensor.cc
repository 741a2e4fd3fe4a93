#include "quant/quant_tensor.h"

namespace nibble {

int64_t QuantTensor::code_row_bytes(WeightCode code, int64_t k) {
  switch (code) {
    case WeightCode::kF32:
      return k * 4;
    case WeightCode::kF16:
    case WeightCode::kBf16:
      return k * 2;
    case WeightCode::kInt8:
    case WeightCode::kFp8E4M3:
      return k;
    case WeightCode::kInt4:
      return (k + 7) / 8 * 4;
    case WeightCode::kFp4E2M1:
      return (k + 1) / 2;
  }
  return 0;
}

Result<QuantTensor> QuantTensor::allocate(const WeightFormat& format, int64_t n, int64_t k) {
  CHECK_GT(n, 0);
  CHECK_GT(k, 0);
  if (format.scale_per == ScalePer::kGroup && k % format.group_size != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{} input channels are not a multiple of the group size {}", k,
                      format.group_size);
  }
  QuantTensor tensor;
  tensor.format = format;
  tensor.n = n;
  tensor.k = k;
  NIBBLE_ASSIGN_OR_RETURN(tensor.codes,
                          Buffer::allocate(static_cast<size_t>(n * tensor.row_bytes())));
  NIBBLE_ASSIGN_OR_RETURN(tensor.scales,
                          Buffer::allocate(static_cast<size_t>(n * format.groups(k)) * 4));
  if (format.zero_points == ZeroPoints::kPerScale) {
    NIBBLE_ASSIGN_OR_RETURN(tensor.zeros,
                            Buffer::allocate(static_cast<size_t>(n * format.groups(k))));
  }
  return tensor;
}

}  // namespace nibble
