#pragma once

#include <vector>

#include "command.h"

namespace nibble {

// The subcommands of `nibble bench`.
void add_bench_offline(CLI::App& bench, CommandContext& context);

/// The middle of the values (of an even number, the upper one); must not be empty.
[[nodiscard]] double median(std::vector<double> values);

}  // namespace nibble
