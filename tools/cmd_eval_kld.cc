#include <chrono>
#include <cmath>
#include <memory>

#include "base/json.h"
#include "command.h"
#include "eval/divergence.h"
#include "eval_model.h"
#include "output.h"
#include "progress.h"

namespace nibble {

void add_eval_kld_command(CLI::App& eval, CommandContext& context);

namespace {

struct KldFlags {
  ModelFlags model;
  std::vector<std::string> models;  // BASE MODEL, or one of them
  TextFlags text;
  std::string base_kv_cache_dtype;  // "": that of the model
  std::string save_base;
  std::string base_file;
  std::string precision = "u16";
  bool json = false;
};

/// What was measured, and how.
struct KldReport {
  PlannedText planned;
  DivergenceResult result;
  std::string base_precision = "f32";
  std::string base_kv_cache_dtype;
  std::string kv_cache_dtype;
  double seconds = 0;
};

Json bucket_json(const DivergenceBucket& bucket) {
  return Json::object({{"from", bucket.from},
                       {"to", bucket.to},
                       {"tokens", bucket.tokens},
                       {"kld", bucket.kl.mean},
                       {"kld_error", bucket.kl.error},
                       {"same_top", bucket.same_top}});
}

Json histogram_json(const DivergenceResult& result) {
  JsonArray bins;
  for (const DivergenceBin& bin : result.histogram) {
    bins.push_back(Json::object({{"from", bin.from}, {"to", bin.to}, {"tokens", bin.tokens}}));
  }
  return bins;
}

Json json_of(const KldReport& report) {
  const DivergenceResult& r = report.result;
  JsonArray buckets;
  for (const DivergenceBucket& bucket : r.buckets) {
    buckets.push_back(bucket_json(bucket));
  }
  return Json::object({{"kld", r.kl.mean},
                       {"kld_error", r.kl.error},
                       {"kld_median", r.median},
                       {"kld_p90", r.p90},
                       {"kld_p99", r.p99},
                       {"kld_p999", r.p999},
                       {"kld_max", r.largest},
                       {"same_top", r.same_top.mean},
                       {"same_top_error", r.same_top.error},
                       {"delta_p", r.delta_p.mean},
                       {"delta_p_error", r.delta_p.error},
                       {"delta_p_rms", r.delta_p_rms.mean},
                       {"delta_p_rms_error", r.delta_p_rms.error},
                       {"ln_ppl_base", r.base_nll.mean},
                       {"ln_ppl_base_error", r.base_nll.error},
                       {"ln_ppl", r.nll.mean},
                       {"ln_ppl_error", r.nll.error},
                       {"ln_ppl_ratio", r.log_ratio.mean},
                       {"ln_ppl_ratio_error", r.log_ratio.error},
                       {"ppl_ratio", std::exp(r.log_ratio.mean)},
                       {"tokens", r.tokens},
                       {"by_context", std::move(buckets)},
                       {"histogram", histogram_json(r)},
                       {"protocol", protocol_name(report.planned.protocol)},
                       {"window", report.planned.window},
                       {"base_precision", report.base_precision},
                       {"base_kv_cache_dtype", report.base_kv_cache_dtype},
                       {"kv_cache_dtype", report.kv_cache_dtype},
                       {"seconds", report.seconds}});
}

std::string text_of(const KldReport& report) {
  const DivergenceResult& r = report.result;
  std::string text = fmt::format(
      "KL divergence {:.6f} +- {:.6f} nats over {} tokens (base in {}); median {:.6f}, "
      "90 % {:.5f}, 99 % {:.4f}, 99.9 % {:.4f}, most {:.4f}\n"
      "same likeliest token {:.3f} +- {:.3f} %; probability of the text's token {:+.3f} +- {:.3f} "
      "%, root mean square {:.3f} +- {:.3f} %\n"
      "perplexity {:.4f}, base {:.4f}; ratio {:.5f} +- {:.5f}; {:.1f} s\n",
      r.kl.mean, r.kl.error, r.tokens, report.base_precision, r.median, r.p90, r.p99, r.p999,
      r.largest, 100 * r.same_top.mean, 100 * r.same_top.error, 100 * r.delta_p.mean,
      100 * r.delta_p.error, 100 * r.delta_p_rms.mean, 100 * r.delta_p_rms.error,
      std::exp(r.nll.mean), std::exp(r.base_nll.mean), std::exp(r.log_ratio.mean),
      std::exp(r.log_ratio.mean) * r.log_ratio.error, report.seconds);
  for (const DivergenceBucket& bucket : r.buckets) {
    text +=
        fmt::format("  {:>5} to {:>5} tokens before: {:.6f} +- {:.6f}, same {:.2f} %\n",
                    bucket.from, bucket.to, bucket.kl.mean, bucket.kl.error, 100 * bucket.same_top);
  }
  return text;
}

/// Both must give probabilities to the same tokens.
Status check_vocabularies(const std::pair<std::string, int64_t>& base,
                          const std::pair<std::string, int64_t>& model) {
  if (base.second == model.second) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument,
                    "{} has a vocabulary of {} tokens, but {} has {}: KL divergences need the same "
                    "one",
                    base.first, base.second, model.first, model.second);
}

Status check_same_tokens(const EvalText& base, const EvalText& model, const KldFlags& flags) {
  if (digest_of_windows(base.windows) == digest_of_windows(model.windows)) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument,
                    "the tokenizers of {} and {} cut the text differently ({} and {} tokens): KL "
                    "divergences need the same one",
                    flags.models[0], flags.models[1], base.tokens, model.tokens);
}

Status check_base_file(const BaseFacts& facts,
                       const KldReport& report,
                       const KldFlags& flags,
                       int64_t vocab_size) {
  NIBBLE_RETURN_IF_ERROR(
      check_vocabularies({facts.model, facts.vocab_size}, {flags.models.back(), vocab_size}));
  if (facts.digest != digest_text(digest_of_windows(report.planned.text.windows))) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: holds {} rows of another text or of other windows (--protocol {}, "
                      "--window {} there; {} and {} here)",
                      flags.base_file, facts.rows, facts.protocol, facts.window,
                      flags.text.protocol, report.planned.window);
  }
  return {};
}

/// One of the models, with its reader.
struct Side {
  EvalModel model;
  std::optional<LogitReader> reader;
};

Result<std::unique_ptr<Side>> open_side(const KldFlags& flags,
                                        const std::string& dir,
                                        const std::string& kv_cache_dtype,
                                        const PlannedText& planned) {
  ModelFlags one = flags.model;
  one.model_dir = dir;
  one.kv_cache_dtype = kv_cache_dtype;
  auto side = std::make_unique<Side>();
  NIBBLE_ASSIGN_OR_RETURN(side->model, open_eval_model(one));
  const int64_t longest = planned.longest_feed();
  NIBBLE_ASSIGN_OR_RETURN(LogitReader reader,
                          side->model.reader(longest, sequences_of_step(longest)));
  side->reader.emplace(std::move(reader));
  return side;
}

BaseFacts facts_of(const Side& base, const PlannedText& planned, BasePrecision precision) {
  return {.model = base.model.name,
          .kv_cache_dtype = std::string(kv_code_name(base.model.kv_code)),
          .protocol = std::string(protocol_name(planned.protocol)),
          .window = planned.window,
          .vocab_size = base.model.model->config().vocab_size,
          .rows = planned.text.scored(),
          .digest = digest_text(digest_of_windows(planned.text.windows)),
          .precision = precision};
}

class KldCommand final {
 public:
  explicit KldCommand(const KldFlags& flags) : pool_(flags.model.threads), flags_(flags) {}

  Status run() {
    const auto start = std::chrono::steady_clock::now();
    NIBBLE_RETURN_IF_ERROR(check_flags());
    NIBBLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(flags_.models.front()));
    NIBBLE_ASSIGN_OR_RETURN(report_.planned,
                            plan_text(flags_.text, flags_.models.front(), *tokenizer));
    if (!flags_.save_base.empty()) {
      return save();
    }
    NIBBLE_RETURN_IF_ERROR(flags_.base_file.empty() ? compare_models() : compare_with_file());
    const auto seconds = std::chrono::steady_clock::now() - start;
    report_.seconds = std::chrono::duration<double>(seconds).count();
    print_out(flags_.json ? json_of(report_).dump() + "\n" : text_of(report_));
    return {};
  }

 private:
  [[nodiscard]] Status check_flags() const {
    const bool one = !flags_.save_base.empty() || !flags_.base_file.empty();
    if (!flags_.save_base.empty() && !flags_.base_file.empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "--save-base and --base-file exclude each other");
    }
    if (flags_.models.size() != (one ? 1U : 2U)) {
      return make_error(StatusCode::kInvalidArgument,
                        "{} models are named, but BASE and MODEL are needed; with --save-base only "
                        "BASE, with --base-file only MODEL",
                        flags_.models.size());
    }
    return {};
  }

  [[nodiscard]] EvalRun shown(ProgressDisplay& display) {
    return {.pool = pool_, .progress = [&, total = report_.planned.text.scored()](int64_t done) {
              display.update(done, total, "");
            }};
  }

  Status compare(BaseRows& base, Side& side) {
    ProgressDisplay display("compared", ProgressDisplay::Unit::kTokens);
    NIBBLE_ASSIGN_OR_RETURN(
        report_.result,
        evaluate_divergence(base, *side.reader, report_.planned.text.windows, shown(display)));
    report_.kv_cache_dtype = kv_code_name(side.model.kv_code);
    return {};
  }

  Status compare_models() {
    NIBBLE_ASSIGN_OR_RETURN(const ModelConfig base_config, load_model_config(flags_.models[0]));
    NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(flags_.models[1]));
    NIBBLE_RETURN_IF_ERROR(check_vocabularies({flags_.models[0], base_config.vocab_size},
                                              {flags_.models[1], config.vocab_size}));
    NIBBLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(flags_.models[1]));
    NIBBLE_ASSIGN_OR_RETURN(const PlannedText other,
                            plan_text(flags_.text, flags_.models[1], *tokenizer));
    NIBBLE_RETURN_IF_ERROR(check_same_tokens(report_.planned.text, other.text, flags_));
    const std::string& dtype = flags_.model.kv_cache_dtype;
    const std::string& base_dtype =
        flags_.base_kv_cache_dtype.empty() ? dtype : flags_.base_kv_cache_dtype;
    NIBBLE_ASSIGN_OR_RETURN(const auto base,
                            open_side(flags_, flags_.models[0], base_dtype, report_.planned));
    NIBBLE_ASSIGN_OR_RETURN(const auto model,
                            open_side(flags_, flags_.models[1], dtype, report_.planned));
    report_.base_kv_cache_dtype = kv_code_name(base->model.kv_code);
    LiveBase live(*base->reader);
    return compare(live, *model);
  }

  Status compare_with_file() {
    NIBBLE_ASSIGN_OR_RETURN(FileBase base, FileBase::open(flags_.base_file, pool_));
    NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(flags_.models[0]));
    NIBBLE_RETURN_IF_ERROR(check_base_file(base.facts(), report_, flags_, config.vocab_size));
    NIBBLE_ASSIGN_OR_RETURN(
        const auto model,
        open_side(flags_, flags_.models[0], flags_.model.kv_cache_dtype, report_.planned));
    report_.base_precision = base_precision_name(base.facts().precision);
    report_.base_kv_cache_dtype = base.facts().kv_cache_dtype;
    return compare(base, *model);
  }

  Status save() {
    NIBBLE_ASSIGN_OR_RETURN(const BasePrecision precision, parse_base_precision(flags_.precision));
    NIBBLE_ASSIGN_OR_RETURN(
        const auto base,
        open_side(flags_, flags_.models[0], flags_.model.kv_cache_dtype, report_.planned));
    const BaseFacts facts = facts_of(*base, report_.planned, precision);
    NIBBLE_ASSIGN_OR_RETURN(BaseFileWriter writer, BaseFileWriter::create(flags_.save_base, facts));
    ProgressDisplay display("evaluated", ProgressDisplay::Unit::kTokens);
    NIBBLE_RETURN_IF_ERROR(
        save_base(*base->reader, report_.planned.text.windows, shown(display), writer));
    const int64_t bytes = facts.rows * base_row_bytes(precision, facts.vocab_size);
    print_out(flags_.json ? Json::object({{"base_file", flags_.save_base},
                                          {"rows", facts.rows},
                                          {"bytes", bytes},
                                          {"base_precision", flags_.precision},
                                          {"tokens_digest", facts.digest}})
                                    .dump() +
                                "\n"
                          : fmt::format("wrote {} rows in {}, {:.1f} MB, to {}\n", facts.rows,
                                        flags_.precision, static_cast<double>(bytes) / 1e6,
                                        flags_.save_base));
    return {};
  }

  ThreadPool pool_;  // first: its lines of cache leave no padding then
  const KldFlags& flags_;
  KldReport report_;
};

}  // namespace

void add_eval_kld_command(CLI::App& eval, CommandContext& context) {
  auto flags = std::make_shared<KldFlags>();
  CLI::App* kld = eval.add_subcommand("kld", "How far a model's predictions are from another's");
  kld->add_option("BASE_MODEL", flags->models, "BASE and MODEL: folders in Hugging Face format")
      ->required()
      ->expected(1, 2);
  add_run_flags(*kld, flags->model);
  kld->add_option("--base-kv-cache-dtype", flags->base_kv_cache_dtype,
                  "The same for BASE (default: as for MODEL)")
      ->check(CLI::IsMember(kv_cache_dtypes()));
  add_text_flags(*kld, flags->text);
  kld->add_option("--save-base", flags->save_base,
                  "Write the log-probabilities of BASE to this file, instead of comparing");
  kld->add_option("--base-precision", flags->precision,
                  "How --save-base stores them: u16 (16 bits with a scale for each row) or f32")
      ->check(CLI::IsMember({"u16", "f32"}))
      ->capture_default_str();
  kld->add_option("--base-file", flags->base_file, "Compare with a file of --save-base");
  kld->add_flag("--json", flags->json, "Print one JSON object: kld, kld_error, same_top, ...");
  kld->callback(
      [flags, &context] { context.action = [flags] { return KldCommand(*flags).run(); }; });
}

}  // namespace nibble
