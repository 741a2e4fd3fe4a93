#include "quantizer/kernels/lanes_avx2.h"
// The vocabulary comes first.
#include "quantizer/kernels/search_lanes.h"

namespace nibble::rows {

const RowKernels kAvx2Rows = rows_named("avx2");

}  // namespace nibble::rows
