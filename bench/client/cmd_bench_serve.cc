#include <memory>

#include <sys/resource.h>

#include "bench/bench_commands.h"
#include "bench/client/serve_bench.h"

namespace nibble {
namespace {

// Every open stream is a descriptor.
void allow_many_descriptors() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

Status run(const LoadFlags& flags) {
  allow_many_descriptors();
  NIBBLE_ASSIGN_OR_RETURN(const ServeBench bench, ServeBench::create(flags));
  if (flags.dataset == "gsm8k") {
    return run_gsm8k(bench);
  }
  if (!flags.compare.empty()) {
    return run_compare(bench);
  }
  return flags.sweep.empty() ? run_single(bench) : run_sweep(bench);
}

}  // namespace

void add_bench_serve(CLI::App& bench, CommandContext& context) {
  auto flags = std::make_shared<LoadFlags>();
  CLI::App* command = bench.add_subcommand("serve", "Latency and throughput of any OpenAI server");
  add_load_flags(*command, *flags);
  command->footer(
      "The first request waits until the server is ready; it and the warm-ups have prompts of "
      "their "
      "own. Requests\nthat fail are counted by reason; when all fail, the exit code is that of the "
      "reason (9: cannot be reached,\n2: refused, 3: no such model or route).\n\n" +
      bench.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
