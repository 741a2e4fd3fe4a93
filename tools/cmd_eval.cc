#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "arch/kv_specs.h"
#include "base/file.h"
#include "base/json.h"
#include "base/math.h"
#include "command.h"
#include "engine/session.h"
#include "eval/perplexity.h"
#include "flag_checks.h"
#include "model_flags.h"
#include "output.h"
#include "progress.h"

namespace nibble {

void add_eval_command(CLI::App& app, CommandContext& context);

namespace {

struct EvalFlags {
  ModelFlags model;
  std::string text_file;
  int64_t window = 512;
  bool json = false;
};

/// What was measured, and how.
struct EvalReport {
  PerplexityResult result;
  double tokens_per_byte = 0;  // makes models of different vocabularies comparable
  double seconds = 0;
  KvCode kv_code = KvCode::kBf16;
};

void print(const EvalFlags& flags, const EvalReport& report) {
  const PerplexityResult& result = report.result;
  const double nats_per_byte = std::log(result.perplexity) * report.tokens_per_byte;
  if (flags.json) {
    const Json json = Json::object({{"perplexity", result.perplexity},
                                    {"tokens", result.scored_tokens},
                                    {"window", flags.window},
                                    {"seconds", report.seconds},
                                    {"nats_per_byte", nats_per_byte},
                                    {"kv_cache_dtype", kv_code_name(report.kv_code)}});
    print_out(json.dump() + "\n");
    return;
  }
  print_out(fmt::format(
      "perplexity {:.4f} over {} scored tokens, windows of {}; {:.4f} nats per byte; {:.1f} s\n",
      result.perplexity, result.scored_tokens, flags.window, nats_per_byte, report.seconds));
}

Result<std::vector<int32_t>> encoded_text(const EvalFlags& flags,
                                          std::string_view text,
                                          const Tokenizer& tokenizer) {
  Result<std::vector<int32_t>> tokens = tokenizer.encode(text, SpecialTokens::kPlain);
  if (!tokens.ok()) {
    return tokens.status().with_context(flags.text_file);
  }
  if (tokens->size() < 2) {
    return make_error(StatusCode::kInvalidArgument, "{}: has {} tokens, but at least 2 are needed",
                      flags.text_file, tokens->size());
  }
  return tokens;
}

Status run(const EvalFlags& flags) {
  const auto start = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(const std::optional<KvCode> asked,
                          parse_kv_cache_dtype(flags.model.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(flags.text_file));
  NIBBLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(flags.model.model_dir));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, encoded_text(flags, text, *tokenizer));
  NIBBLE_ASSIGN_OR_RETURN(const auto backend, open_backend(backend_of(flags.model)));
  NIBBLE_ASSIGN_OR_RETURN(const auto model, load_model(flags.model.model_dir, *backend, {}));
  const ModelConfig& config = model->config();
  if (flags.window > config.max_position) {
    return make_error(StatusCode::kInvalidArgument,
                      "--window {}: the model's context ends at {} (config.json: {})", flags.window,
                      config.max_position, positions_name(config));
  }
  const KvCode kv_code = kv_code_for(asked, config, *backend);
  const int64_t page_size = backend->preferred_page_size(kv_code);
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(KvCacheShape::equal_pools(
                                                  kv_specs(config, kv_code), page_size,
                                                  ceil_div(flags.window, page_size))));
  ProgressDisplay display("evaluated", ProgressDisplay::Unit::kTokens);
  const auto size = static_cast<int64_t>(tokens.size());
  const int64_t evaluated = size - size % std::min(size, flags.window);  // whole windows only
  const PerplexityOptions options{
      .window = flags.window, .threads = flags.model.threads, .progress = [&](int64_t done) {
        display.update(done, evaluated, "");
      }};
  EvalReport report;
  NIBBLE_ASSIGN_OR_RETURN(report.result, evaluate_perplexity(*model, cache, tokens, options));
  report.tokens_per_byte = static_cast<double>(size) / static_cast<double>(text.size());
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.kv_code = kv_code;
  print(flags, report);
  return {};
}

}  // namespace

void add_eval_command(CLI::App& app, CommandContext& context) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* eval = app.add_subcommand("eval", "Measure what a model knows");
  eval->require_subcommand(1);
  CLI::App* ppl = eval->add_subcommand("ppl", "Perplexity of a text file");
  add_model_flags(*ppl, flags->model);
  ppl->add_option("--text", flags->text_file, "Text file, tokenized whole without special tokens")
      ->required();
  ppl->add_option("--window", flags->window, "Tokens per window; windows do not overlap")
      ->check(whole_number(2))
      ->capture_default_str();
  ppl->add_flag("--json", flags->json,
                "Print one JSON object: perplexity, tokens, window, seconds, ...");
  ppl->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
