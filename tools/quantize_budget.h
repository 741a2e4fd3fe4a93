#pragma once

#include "base/status.h"
#include "quantize_flags.h"

namespace nibble {

/// --budget, --schemes and what goes with them.
void add_budget_flags(CLI::App& command, QuantizeFlags& flags);

/// kInvalidArgument, naming them, for flags that contradict --budget or need it; kUnsupported for
/// schemes that --method does not round.
Status check_budget_flags(const QuantizeFlags& flags);

/// Chooses a scheme for each matrix within flags.budget, as `nibble sensitivity` does, and enters
/// the choice into flags.options.plan and flags.choice. What a run that was interrupted, or the
/// output that is there, was made by is taken again without measuring. Unless it is a dry run, the
/// choice is kept in the work folder.
/// Errors: those of measure_sensitivity() and choose_schemes(); kInvalidArgument where unfinished
/// work was chosen otherwise; kAlreadyExists.
Status choose_for_budget(QuantizeFlags& flags);

}  // namespace nibble
