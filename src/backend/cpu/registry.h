#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "backend/backend.h"
#include "backend/cpu/workspace.h"
#include "backend/gemm_problem.h"

namespace nibble::cpu {

/// What products ask of their backend, which outlives them.
struct GemmDevice {
  const KernelTable& kernels;  // of the instruction set
  BufferArena& arena;
  Workspace& workspace;
  bool exact = false;  // BF16 activations are not rounded further: see CpuBackendOptions
};

/// A matrix to prepare: the rows of its parts, one below the other.
struct GemmRequest {
  std::span<const QuantView> parts;
  GemmProblem problem;
  const ActSpec& act;  // whose format the problem has
  int64_t max_m = 0;   // rows of activations at most
};

struct TiledProduct;

/// A kernel of matrix products, with its own layout of the weights. registry.cc lists them, best
/// first: a product takes the first entry that accepts it.
struct GemmEntry {
  std::string_view name;  // "gemm_w4a8"; the instruction set follows it where the name is printed
  bool (*accepts)(const GemmProblem& problem, const GemmDevice& device);
  Result<std::unique_ptr<PreparedGemm>> (*make)(const GemmRequest& request,
                                                const GemmDevice& device);
  const TiledProduct* tiled = nullptr;  // what it is where weights are packed as PackedMatrix does
};

[[nodiscard]] std::span<const GemmEntry> gemm_entries();

/// kUnsupported, with the reason and a remedy, for a product that no entry accepts.
[[nodiscard]] Status refuse_product(const GemmProblem& problem, const GemmDevice& device);

}  // namespace nibble::cpu
