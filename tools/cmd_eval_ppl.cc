#include <chrono>
#include <cmath>
#include <memory>

#include "base/json.h"
#include "command.h"
#include "eval/perplexity.h"
#include "eval_model.h"
#include "output.h"
#include "progress.h"

namespace nibble {

void add_eval_ppl_command(CLI::App& eval, CommandContext& context);

namespace {

struct PplFlags {
  ModelFlags model;
  TextFlags text;
  bool json = false;
};

/// What was measured, and how.
struct PplReport {
  PlannedText planned;
  PerplexityResult result;
  double seconds = 0;
  KvCode kv_code = KvCode::kBf16;

  [[nodiscard]] double nats_per_byte() const {  // makes models of different vocabularies comparable
    return result.nll.mean * static_cast<double>(planned.text.tokens) /
           static_cast<double>(planned.text.bytes);
  }
  [[nodiscard]] double per_word() const {
    return std::exp(result.nll_sum / static_cast<double>(planned.text.words));
  }
};

Json json_of(const PplReport& report) {
  const PerplexityResult& result = report.result;
  Json json = Json::object({{"perplexity", result.perplexity},
                            {"tokens", result.scored_tokens},
                            {"window", report.planned.window},
                            {"seconds", report.seconds},
                            {"nats_per_byte", report.nats_per_byte()},
                            {"kv_cache_dtype", kv_code_name(report.kv_code)},
                            {"protocol", protocol_name(report.planned.protocol)},
                            {"perplexity_error", result.perplexity * result.nll.error},
                            {"nats_per_token", result.nll.mean},
                            {"nats_per_token_error", result.nll.error},
                            {"text_tokens", report.planned.text.tokens}});
  if (report.planned.protocol == Protocol::kLmEval) {  // the others do not score every token
    const double per_byte = result.nll_sum / static_cast<double>(report.planned.text.bytes);
    json.set("word_perplexity", report.per_word());
    json.set("byte_perplexity", std::exp(per_byte));
    json.set("bits_per_byte", per_byte / std::log(2.0));
    json.set("words", report.planned.text.words);
  }
  return json;
}

std::string text_of(const PplReport& report) {
  const PerplexityResult& result = report.result;
  std::string text = fmt::format(
      "perplexity {:.4f} +- {:.4f} over {} scored tokens, windows of {}; {:.4f} nats per byte; "
      "{:.1f} s\n",
      result.perplexity, result.perplexity * result.nll.error, result.scored_tokens,
      report.planned.window, report.nats_per_byte(), report.seconds);
  if (report.planned.protocol == Protocol::kLmEval) {
    text += fmt::format("word perplexity {:.4f} over {} words\n", report.per_word(),
                        report.planned.text.words);
  }
  return text;
}

Status run(const PplFlags& flags) {
  const auto start = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::load(flags.model.model_dir));
  PplReport report;
  NIBBLE_ASSIGN_OR_RETURN(report.planned, plan_text(flags.text, flags.model.model_dir, *tokenizer));
  NIBBLE_ASSIGN_OR_RETURN(EvalModel model, open_eval_model(flags.model, std::move(tokenizer)));
  const int64_t longest = report.planned.longest_feed();
  NIBBLE_ASSIGN_OR_RETURN(LogitReader reader, model.reader(longest, sequences_of_step(longest)));
  ProgressDisplay display("evaluated", ProgressDisplay::Unit::kTokens);
  const int64_t total = report.planned.text.scored();
  ThreadPool pool(flags.model.threads);
  const EvalRun options{.pool = pool,
                        .progress = [&](int64_t done) { display.update(done, total, ""); }};
  NIBBLE_ASSIGN_OR_RETURN(report.result,
                          evaluate_perplexity(reader, report.planned.text.windows, options));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.kv_code = model.kv_code;
  print_out(flags.json ? json_of(report).dump() + "\n" : text_of(report));
  return {};
}

}  // namespace

void add_eval_ppl_command(CLI::App& eval, CommandContext& context) {
  auto flags = std::make_shared<PplFlags>();
  CLI::App* ppl = eval.add_subcommand("ppl", "Perplexity of a text file");
  add_model_flags(*ppl, flags->model);
  add_text_flags(*ppl, flags->text);
  ppl->add_flag("--json", flags->json,
                "Print one JSON object: perplexity, tokens, window, seconds, ...");
  ppl->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
