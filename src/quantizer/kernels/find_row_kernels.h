#pragma once

#include <string_view>

#include "base/status.h"
#include "quantizer/kernels/row_kernels.h"

namespace nibble::rows {

/// Row kernels by name: scalar, avx2, avx512, or "auto" for the best of this machine.
/// kInvalidArgument for an unknown name, kUnsupported when the machine lacks it.
Result<const RowKernels*> find_row_kernels(std::string_view isa);

}  // namespace nibble::rows
