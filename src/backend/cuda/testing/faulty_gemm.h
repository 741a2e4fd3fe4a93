#pragma once

#include <cstdint>
#include <span>

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda::testing {

/// What is wrong with a GPU.
enum class Fault : uint8_t {
  kNone,
  kDamagedWeights,  // packed weights have wrong bytes
  kTrap,            // a kernel faults in front of a product, late enough to be in mid-run
  kWrongFewRows,    // W4A16 kernels for 9 to 16 rows leave zeros in the last of them
};

/// All families of products, with the fault. For kTrap, `runs` products are computed before it, of
/// all backends of the process and counted on the GPU, so that recorded steps count too. One fault
/// is in force at a time.
std::span<const GemmEntry> faulty_gemms(Fault fault, uint32_t runs = 0);

}  // namespace nibble::cuda::testing
