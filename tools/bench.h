#pragma once

#include <vector>

#include "backend/backend.h"
#include "command.h"

namespace nibble {

// The subcommands of `nibble bench`.
void add_bench_offline(CLI::App& bench, CommandContext& context);
void add_bench_kernels(CLI::App& bench, CommandContext& context);
void add_bench_quantize(CLI::App& bench, CommandContext& context);
void add_bench_capacity(CLI::App& bench, CommandContext& context);

/// Threads placed as those of a backend with these options, which has `threads` of them.
[[nodiscard]] ThreadPlan bench_threads(const CpuBackendOptions& options, int threads);

/// The middle of the values (of an even number, the upper one); must not be empty.
[[nodiscard]] double median(std::vector<double> values);

}  // namespace nibble
