#include <algorithm>
#include <memory>
#include <string>

#include "base/json.h"
#include "command.h"
#include "flag_checks.h"
#include "output.h"
#include "progress.h"
#include "quantizer/verify.h"

namespace nibble {

void add_verify_command(CLI::App& app, CommandContext& context);

namespace {

constexpr size_t kWorstListed = 5;
constexpr size_t kProblemsListed = 20;

struct Flags {
  VerifyOptions options;
  double min_snr = -1e9;
  bool json = false;
};

double mean_db(const VerifyReport& report) {
  double sum = 0;
  for (const VerifiedMatrix& matrix : report.matrices) {
    sum += matrix.snr_db;
  }
  return report.matrices.empty() ? 0 : sum / static_cast<double>(report.matrices.size());
}

Json report_json(const VerifyReport& report) {
  JsonArray matrices;
  for (const VerifiedMatrix& matrix : report.matrices) {
    matrices.push_back(Json::object({{"name", matrix.module},
                                     {"source", matrix.source_format},
                                     {"format", matrix.format},
                                     {"n", matrix.n},
                                     {"k", matrix.k},
                                     {"snr_db", matrix.snr_db},
                                     {"cosine", matrix.cosine},
                                     {"max_error", static_cast<double>(matrix.max_error)}}));
  }
  return Json::object({{"ok", report.problems.empty()},
                       {"quantized", static_cast<int64_t>(report.matrices.size())},
                       {"copied_tensors", report.copied_tensors},
                       {"copied_files", report.copied_files},
                       {"snr_db_mean", mean_db(report)},
                       {"problems", JsonArray(report.problems.begin(), report.problems.end())},
                       {"worst_first", std::move(matrices)}});
}

void print_report(const VerifyReport& report) {
  print_out(fmt::format(
      "{} quantized matrices decoded again, {} tensors and {} files equal to the source\n",
      report.matrices.size(), report.copied_tensors, report.copied_files));
  if (!report.matrices.empty()) {
    print_out(fmt::format("signal to noise of weights, dB: mean {:.2f}, worst {:.2f}\n",
                          mean_db(report), report.matrices.front().snr_db));
  }
  for (size_t i = 0; i < std::min(kWorstListed, report.matrices.size()); ++i) {
    const VerifiedMatrix& matrix = report.matrices[i];
    print_out(fmt::format("  {:6.2f}  {} ({} -> {})\n", matrix.snr_db, matrix.module,
                          matrix.source_format, matrix.format));
  }
}

Status check(VerifyReport& report, const Flags& flags) {
  for (const VerifiedMatrix& matrix : report.matrices) {
    if (matrix.snr_db < flags.min_snr) {
      report.problems.push_back(fmt::format("{}: {:.2f} dB, less than --min-snr {}", matrix.module,
                                            matrix.snr_db, flags.min_snr));
    }
  }
  if (report.problems.empty()) {
    return {};
  }
  std::string text =
      fmt::format("{}: {} problems", flags.options.destination, report.problems.size());
  for (size_t i = 0; i < std::min(kProblemsListed, report.problems.size()); ++i) {
    text += "\n  " + report.problems[i];
  }
  if (report.problems.size() > kProblemsListed) {
    text += "\n  and more; --json lists all";
  }
  return {StatusCode::kCorrupt, text};
}

Status run(Flags& flags) {
  ProgressDisplay display("verified", ProgressDisplay::Unit::kBytes);
  flags.options.progress = [&display](int64_t done, int64_t total, const std::string& tensor) {
    display.update(done, total, tensor);
  };
  NIBBLE_ASSIGN_OR_RETURN(VerifyReport report, verify_checkpoint(flags.options));
  Status status = check(report, flags);
  if (flags.json) {
    print_out(report_json(report).dump() + "\n");
  } else {
    print_report(report);
  }
  return status;
}

}  // namespace

void add_verify_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "verify", "Decode a quantized model again and compare it with the model it was made from");
  VerifyOptions& options = flags->options;
  command->add_option("SRC", options.source, "Folder of the model that was quantized")->required();
  command->add_option("DST", options.destination, "Folder of the result")->required();
  command->add_option("--min-snr", flags->min_snr, "Fail when a matrix has fewer dB than this");
  command->add_option("--threads", options.threads, "Worker threads; 0: all cores")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  command->add_flag("--json", flags->json,
                    "Print one JSON object: ok, quantized, copied_tensors, copied_files, "
                    "snr_db_mean, problems, worst_first");
  command->footer(
      "Tensors that were not quantized, tokenizer files and config.json (apart from its\n"
      "quantization_config) must equal the source; figures in quantization_report.json must agree\n"
      "with the files. Ends with an error that lists what does not.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
