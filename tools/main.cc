#include <cstdio>
#include <exception>
#include <map>
#include <string>

#include "base/check.h"
#include "base/log.h"
#include "command.h"
#include "output.h"

namespace nibble {

// The subcommands, in the order of --help; cmd_<name>.cc defines them, add_commands() calls them.
void add_generate_command(CLI::App& app, CommandContext& context);
void add_chat_command(CLI::App& app, CommandContext& context);
void add_quantize_command(CLI::App& app, CommandContext& context);
void add_import_command(CLI::App& app, CommandContext& context);
void add_calibrate_kv_command(CLI::App& app, CommandContext& context);
void add_verify_command(CLI::App& app, CommandContext& context);
void add_sensitivity_command(CLI::App& app, CommandContext& context);
void add_inspect_command(CLI::App& app, CommandContext& context);
void add_eval_command(CLI::App& app, CommandContext& context);
void add_serve_command(CLI::App& app, CommandContext& context);
void add_bench_command(CLI::App& app, CommandContext& context);
void add_make_dummy_command(CLI::App& app, CommandContext& context);

namespace {

constexpr int kInternalErrorExit = 70;
constexpr const char* kFooter =
    "Results go to stdout, logs to stderr; commands with --json print one JSON object.\n"
    "Exit codes: 0 success, 2 invalid argument, 3 not found, 4 corrupt file, 5 unsupported,\n"
    "6 output exists, 7 out of memory, disk or pages, 8 I/O error, 9 unavailable, 10 cancelled,\n"
    "70 internal error.";

void add_commands(CLI::App& app, CommandContext& context) {
  add_generate_command(app, context);
  add_chat_command(app, context);
  add_quantize_command(app, context);
  add_import_command(app, context);
  add_calibrate_kv_command(app, context);
  add_verify_command(app, context);
  add_sensitivity_command(app, context);
  add_inspect_command(app, context);
  add_eval_command(app, context);
  add_serve_command(app, context);
  add_bench_command(app, context);
  add_make_dummy_command(app, context);
}

void add_global_options(CLI::App& app) {
  app.set_version_flag("--version", std::string("nibble ") + NIBBLE_VERSION);
  app.footer(kFooter);
  app.fallthrough();
  static constexpr const char* kHelp = "Least severe messages to log: debug, info, warning, error";
  const std::map<std::string, LogLevel> levels = {{"debug", LogLevel::kDebug},
                                                  {"info", LogLevel::kInfo},
                                                  {"warning", LogLevel::kWarning},
                                                  {"error", LogLevel::kError}};
  app.add_option_function<std::string>(
         "--log-level", [levels](const std::string& name) { set_log_level(levels.at(name)); },
         kHelp)
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->default_str("info");
}

void report(const Status& status) {
  std::fprintf(stderr, "nibble: %s: %s\n", std::string(to_string(status.code())).c_str(),
               status.message().c_str());
}

/// The command whose --help explains what went wrong: "nibble eval ppl".
std::string chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app.get_name() : app.get_name() + " " + chosen_command(*chosen.front());
}

int report_usage(const CLI::App& app, const std::string& what) {
  const std::string line = what.substr(0, what.find('\n'));
  report(make_error(StatusCode::kInvalidArgument, "{}; see {} --help", line, chosen_command(app)));
  return exit_code(StatusCode::kInvalidArgument);
}

int run_main(int argc, char** argv) {
  CommandContext context;
  CLI::App app("nibble: low-bit inference and quantization of language models", "nibble");
  add_global_options(app);
  add_commands(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : report_usage(app, error.what());
  }
  if (!context.action) {
    std::fputs(app.help().c_str(), stderr);
    return report_usage(app, "a subcommand is required");
  }
  Status status = context.action();
  if (status.ok()) {
    status = flush_output();
  }
  if (!status.ok()) {
    report(status);
  }
  return exit_code(status.code());
}

}  // namespace
}  // namespace nibble

int main(int argc, char** argv) {
  try {
    return nibble::run_main(argc, argv);
  } catch (const nibble::InternalError& error) {
    std::fprintf(stderr, "nibble: internal error: %s\n", error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nibble: internal error: uncaught exception: %s\n", error.what());
  }
  return nibble::kInternalErrorExit;
}
