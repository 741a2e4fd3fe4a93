#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backend/cpu/kernel_table.h"
#include "base/status.h"

namespace nibble::cpu {

/// For tests: kernels that do the same as those of an instruction set that the machine lacks.
struct StandIns {
  const KernelTable* avx512 = nullptr;  // with VNNI
  const KernelTable* amx = nullptr;
};

/// What of the processor the kernels can use, as far as the operating system saves its registers.
struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C
  bool avx2_vnni = false;    // and AVX-VNNI
  bool avx512 = false;       // F, DQ, BW, VL
  bool avx512_vnni = false;  // and VNNI
  bool amx = false;          // tiles of int8 and bf16, permitted by the operating system
  int amx_refusal = 0;       // errno of a processor's AMX that the operating system refused
  // Whether weights should come into the second level of caches long before the first, whose lines
  // on their way are too few for a core's share of the bandwidth. AMD's read a sixth slower so.
  bool fetch_far = true;
  StandIns stand_ins;
};

[[nodiscard]] CpuFeatures detect_cpu_features();

/// From now on detect_cpu_features() has these stand-ins; for tests, before any thread asks.
void set_stand_ins(const StandIns& stand_ins);

/// Names of the instruction sets that this machine and its operating system support, slowest
/// first; always begins with "scalar".
[[nodiscard]] std::vector<std::string_view> supported_isas(
    const CpuFeatures& features = detect_cpu_features());

/// Warns when the choice `chosen` is worse than the processor could do, or has no vectors at all.
void log_missing(const CpuFeatures& features, std::string_view chosen);

/// Kernels of the named instruction set; "auto" is the last of supported_isas(). kUnsupported with
/// the list when the machine lacks it, kInvalidArgument for an unknown name.
[[nodiscard]] Result<const KernelTable*> find_kernels(
    std::string_view isa, const CpuFeatures& features = detect_cpu_features());

}  // namespace nibble::cpu
