#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backend/cpu/kernel_table.h"
#include "base/status.h"

namespace nibble::cpu {

/// Names of the instruction sets that this machine and its operating system support, slowest
/// first; always begins with "scalar".
[[nodiscard]] std::vector<std::string_view> supported_isas();

/// Kernels of the named instruction set; "auto" is the last of supported_isas(). kUnsupported with
/// the list when the machine lacks it, kInvalidArgument for an unknown name.
[[nodiscard]] Result<const KernelTable*> find_kernels(std::string_view isa);

}  // namespace nibble::cpu
