#pragma once

#include "backend/backend.h"
#include "tools/command.h"

namespace nibble {

// The subcommands of `nibble bench`.
void add_bench_offline(CLI::App& bench, CommandContext& context);
void add_bench_kernels(CLI::App& bench, CommandContext& context);
void add_bench_moe(CLI::App& bench, CommandContext& context);
void add_bench_quantize(CLI::App& bench, CommandContext& context);
void add_bench_capacity(CLI::App& bench, CommandContext& context);
void add_bench_serve(CLI::App& bench, CommandContext& context);

/// Threads placed as those of a backend with these options, which has `threads` of them.
[[nodiscard]] ThreadPlan bench_threads(const CpuBackendOptions& options, int threads);

}  // namespace nibble
