#pragma once

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/workspace.h"
#include "ops/latent.h"

namespace nibble::cpu {

/// The rows of latent attention on the CPU, spread over its threads.
void append_latent(const KernelTable& kernels, Workspace& workspace, const LatentAppendArgs& args);
void rotate_latent_queries(const KernelTable& kernels,
                           Workspace& workspace,
                           const LatentQueryArgs& args);

}  // namespace nibble::cpu
