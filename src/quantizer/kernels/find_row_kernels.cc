#include "quantizer/kernels/find_row_kernels.h"

#include "backend/cpu/isa.h"

namespace nibble::rows {

Result<const RowKernels*> find_row_kernels(std::string_view isa) {
  const RowKernels* best = &kScalarRows;
  const RowKernels* named = isa == kScalarRows.isa ? best : nullptr;
  bool known = isa == kScalarRows.isa || isa == "auto";
#if defined(__x86_64__)
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  const auto offer = [&](const RowKernels& table, bool supported) {
    known = known || table.isa == isa;
    best = supported ? &table : best;
    named = supported && table.isa == isa ? &table : named;
  };
  offer(kAvx2Rows, features.avx2);
  offer(kAvx512Rows, features.avx512);
#endif
  if (!known) {
    return make_error(StatusCode::kInvalidArgument,
                      "unknown instruction set \"{}\"; choose auto, scalar, avx2 or avx512", isa);
  }
  named = isa == "auto" ? best : named;
  if (named == nullptr) {
    return make_error(StatusCode::kUnsupported, "this machine has no {}; the best is {}", isa,
                      best->isa);
  }
  return named;
}

}  // namespace nibble::rows
