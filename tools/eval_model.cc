#include "eval_model.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "arch/kv_specs.h"
#include "base/file.h"
#include "base/math.h"
#include "flag_checks.h"

namespace nibble {
namespace {

std::string name_of(const std::string& model_dir) {
  std::error_code ignored;
  const auto path = std::filesystem::weakly_canonical(model_dir, ignored);
  return ignored ? model_dir : path.filename().string();
}

}  // namespace

Result<LogitReader> EvalModel::reader(int64_t longest, int64_t sequences) {
  return LogitReader::create(*model, {.layers = kv_specs(model->config(), kv_code),
                                      .page_size = backend->preferred_page_size(kv_code),
                                      .longest = longest,
                                      .sequences = sequences,
                                      .limits = limits});
}

void add_text_flags(CLI::App& command, TextFlags& flags) {
  command.add_option("--text", flags.file, "Text file")->required();
  command
      .add_option(
          "--protocol", flags.protocol,
          "How the text is cut and what is scored: ours (no special tokens, windows without "
          "overlap), gptq (as in papers), llama.cpp, lm-eval (WikiText by pages)")
      ->check(CLI::IsMember(protocol_names()))
      ->capture_default_str();
  command
      .add_option("--window", flags.window,
                  "Tokens per window (default: 512; with gptq 2048; with lm-eval the model's "
                  "context)")
      ->check(whole_number(2));
}

int64_t PlannedText::longest_feed() const {
  int64_t longest = 0;
  for (const EvalWindow& one : text.windows) {
    longest = std::max(longest, std::ssize(one.tokens) - 1);
  }
  return longest;
}

Result<PlannedText> plan_text(const TextFlags& flags,
                              const std::string& model_dir,
                              const Tokenizer& tokenizer) {
  PlannedText out;
  NIBBLE_ASSIGN_OR_RETURN(out.protocol, parse_protocol(flags.protocol));
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(flags.file));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(model_dir));
  const int64_t context = config.max_position;
  out.window = flags.window > 0 ? flags.window : default_window(out.protocol, context);
  if (out.window > context) {
    return make_error(StatusCode::kInvalidArgument,
                      "--window {}: the model's context ends at {} (config.json: {})", out.window,
                      context, positions_name(config));
  }
  auto planned = plan_windows(text, tokenizer, out.protocol, out.window);
  if (!planned.ok()) {
    return planned.status().with_context(flags.file);
  }
  out.text = std::move(planned).value();
  return out;
}

Result<EvalModel> open_eval_model(const ModelFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::load(flags.model_dir));
  return open_eval_model(flags, std::move(tokenizer));
}

Result<EvalModel> open_eval_model(const ModelFlags& flags, std::unique_ptr<Tokenizer> tokenizer) {
  NIBBLE_ASSIGN_OR_RETURN(const std::optional<KvCode> asked,
                          parse_kv_cache_dtype(flags.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(flags.model_dir));
  EvalModel out;
  out.name = name_of(flags.model_dir);
  out.tokenizer = std::move(tokenizer);
  NIBBLE_ASSIGN_OR_RETURN(out.backend, open_backend(backend_of(flags)));
  out.limits = LogitLimits::of_vocabulary(config.vocab_size);
  out.kv_code = kv_code_for(asked, config, *out.backend);
  ModelOptions options = out.limits.model_options();
  options.kv_code = out.kv_code;
  options.ignore_fmpq = flags.ignore_fmpq;
  NIBBLE_ASSIGN_OR_RETURN(out.model, load_model(flags.model_dir, *out.backend, options));
  return out;
}

int64_t sequences_of_step(int64_t longest) {
  return ceil_div(LogitLimits().tokens, std::max<int64_t>(longest, 1));
}

}  // namespace nibble
