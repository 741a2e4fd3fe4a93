#include "quant/quant_tensor.h"

#include "quant/code_traits.h"

namespace nibble {

int64_t QuantTensor::code_row_bytes(WeightCode code, int64_t k) {
  if (code == WeightCode::kInt4) {
    return (k + 7) / 8 * 4;  // whole words
  }
  return (k * code_traits(code).bits + 7) / 8;
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
  } else if (format.zero_points == ZeroPoints::kMinimum) {
    NIBBLE_ASSIGN_OR_RETURN(tensor.minimums, Buffer::allocate(tensor.scales.size()));
  }
  return tensor;
}

}  // namespace nibble
