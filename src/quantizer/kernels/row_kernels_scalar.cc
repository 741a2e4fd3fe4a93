#include "quantizer/kernels/lanes_scalar.h"
// The vocabulary comes first.
#include "quantizer/kernels/search_lanes.h"

namespace nibble::rows {

const RowKernels kScalarRows = rows_named("scalar");

}  // namespace nibble::rows
