#include "quantizer/kernels/lanes_avx512.h"
// The vocabulary comes first.
#include "quantizer/kernels/search_lanes.h"

namespace nibble::rows {

const RowKernels kAvx512Rows = rows_named("avx512");

}  // namespace nibble::rows
