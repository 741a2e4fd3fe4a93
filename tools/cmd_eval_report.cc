#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "command.h"
#include "eval/report/evaluation_report.h"
#include "output.h"
#include "quantizer/quantize_report.h"

namespace nibble {

void add_eval_report_command(CLI::App& eval, CommandContext& context);

namespace {

struct ReportFlags {
  std::string out;
  std::vector<std::string> results;  // FILE or LABEL=FILE
};

/// A result's file, and the method that it belongs to.
struct Named {
  std::string label;
  std::string path;
};

Named named(const std::string& result) {
  namespace fs = std::filesystem;
  const size_t equals = result.find('=');
  if (equals != std::string::npos && equals > 0 && !file_exists(result)) {
    return {result.substr(0, equals), result.substr(equals + 1)};
  }
  const fs::path path(result);
  const fs::path folder = fs::absolute(path).parent_path().filename();
  return {path.filename() == kReportName ? folder.string() : path.stem().string(), result};
}

Status run(const ReportFlags& flags) {
  EvaluationReport report;
  for (const std::string& result : flags.results) {
    const auto [label, path] = named(result);
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
    const auto json = Json::parse(text);
    NIBBLE_RETURN_IF_ERROR(json.status().with_context(path));
    NIBBLE_RETURN_IF_ERROR(report.add(label, *json, path));
  }
  NIBBLE_RETURN_IF_ERROR(write_text_file(flags.out, evaluation_html(report)));
  print_out(fmt::format("wrote {}\n", flags.out));
  return {};
}

}  // namespace

void add_eval_report_command(CLI::App& eval, CommandContext& context) {
  auto flags = std::make_shared<ReportFlags>();
  CLI::App* command =
      eval.add_subcommand("report", "One web page of the results of several methods");
  command->add_option("OUT", flags->out, "HTML file to write")->required();
  command
      ->add_option("RESULT", flags->results,
                   "FILE or LABEL=FILE: what eval or quantize printed with --json, or an output's "
                   "quantization_report.json; results of one label are one method (without a "
                   "label: the file's name)")
      ->required();
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
