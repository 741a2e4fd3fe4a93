#include "command.h"

namespace nibble {

void add_eval_command(CLI::App& app, CommandContext& context);
void add_eval_ppl_command(CLI::App& eval, CommandContext& context);
void add_eval_kld_command(CLI::App& eval, CommandContext& context);
void add_eval_tasks_command(CLI::App& eval, CommandContext& context);
void add_eval_gsm8k_command(CLI::App& eval, CommandContext& context);
void add_eval_report_command(CLI::App& eval, CommandContext& context);

void add_eval_command(CLI::App& app, CommandContext& context) {
  CLI::App* eval = app.add_subcommand("eval", "Measure what a model knows");
  eval->require_subcommand(1);
  add_eval_ppl_command(*eval, context);
  add_eval_kld_command(*eval, context);
  add_eval_tasks_command(*eval, context);
  add_eval_gsm8k_command(*eval, context);
  add_eval_report_command(*eval, context);
}

}  // namespace nibble
