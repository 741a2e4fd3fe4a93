#pragma once

#include <functional>

#include <CLI/CLI.hpp>

#include "base/status.h"

namespace nibble {

/// What the subcommands hand to main. A subcommand only records its work while the command line is
/// parsed; main runs it afterwards, so that logging and error handling are set up once, in main.
struct CommandContext {
  /// Set by the callback of the chosen subcommand. Results go to stdout, everything else to stderr.
  std::function<Status()> action;
};

// Each tools/cmd_X.cc defines one of these; main.cc lists them. The function adds the subcommand
// with all its flags to `app`; its callback sets context.action. The context outlives the app.

}  // namespace nibble
