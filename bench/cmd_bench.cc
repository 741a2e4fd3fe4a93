#include "bench/bench_commands.h"

namespace nibble {

void add_bench_command(CLI::App& app, CommandContext& context);

ThreadPlan bench_threads(const CpuBackendOptions& options, int threads) {
  return plan_threads(read_cpu_topology(),
                      {.threads = threads, .pinning = options.pinning, .numa = options.numa});
}

void add_bench_command(CLI::App& app, CommandContext& context) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed, beside what the machine can do");
  bench->require_subcommand(1);
  add_bench_offline(*bench, context);
  add_bench_kernels(*bench, context);
  add_bench_moe(*bench, context);
  add_bench_quantize(*bench, context);
  add_bench_capacity(*bench, context);
  add_bench_serve(*bench, context);
}

}  // namespace nibble
