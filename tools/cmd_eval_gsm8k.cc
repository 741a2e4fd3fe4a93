#include <chrono>
#include <memory>

#include "base/json.h"
#include "command.h"
#include "eval/generation.h"
#include "eval/gsm8k.h"
#include "eval/statistics.h"
#include "flag_checks.h"
#include "model_flags.h"
#include "output.h"
#include "progress.h"

namespace nibble {

void add_eval_gsm8k_command(CLI::App& eval, CommandContext& context);

namespace {

struct Gsm8kFlags {
  ModelFlags model;
  std::string data;
  std::string examples;
  int64_t limit = 0;
  int64_t fewshot = 5;
  int64_t max_tokens = 256;
  int64_t max_num_seqs = 64;
  std::string samples;
  bool json = false;
};

/// Examples for the prompt, and problems to solve.
struct Problems {
  std::vector<GsmProblem> examples;
  std::vector<GsmProblem> asked;
};

Result<Problems> read_problems(const Gsm8kFlags& flags) {
  Problems out;
  const auto fewshot = static_cast<size_t>(flags.fewshot);
  const bool own = flags.examples.empty() && fewshot > 0;  // the first of --data are examples
  const int64_t wanted = flags.limit == 0 ? 0 : flags.limit + (own ? flags.fewshot : 0);
  NIBBLE_ASSIGN_OR_RETURN(out.asked, read_gsm8k(flags.data, wanted));
  if (fewshot == 0) {
    return out;
  }
  if (own) {
    out.examples = out.asked;
  } else {
    NIBBLE_ASSIGN_OR_RETURN(out.examples, read_gsm8k(flags.examples, flags.fewshot));
  }
  if (out.examples.size() < fewshot + (own ? 1 : 0)) {
    return make_error(StatusCode::kInvalidArgument, "--fewshot {}: {} has {} problems{}",
                      flags.fewshot, own ? flags.data : flags.examples, out.examples.size(),
                      own ? ", and the examples are not asked; see --examples" : "");
  }
  out.examples.resize(fewshot);
  if (own) {
    out.asked.erase(out.asked.begin(), out.asked.begin() + flags.fewshot);
  }
  return out;
}

Result<ServingSession> open_engine(const Gsm8kFlags& flags) {
  SessionOptions options;
  options.backend = backend_of(flags.model);
  options.engine.max_num_seqs = flags.max_num_seqs;
  NIBBLE_ASSIGN_OR_RETURN(options.kv_code, parse_kv_cache_dtype(flags.model.kv_cache_dtype));
  return open_session(flags.model.model_dir, options);
}

// A prompt that leaves no room for an answer loses tokens in front.
Result<std::vector<std::vector<int32_t>>> encode_prompts(const Problems& problems,
                                                         const ServingSession& session,
                                                         int64_t max_tokens) {
  const int64_t room = session.engine->options().max_model_len - max_tokens;
  if (room < 1) {
    return make_error(StatusCode::kInvalidArgument,
                      "--max-tokens {}: leaves no room for a prompt in a context of {}", max_tokens,
                      session.engine->options().max_model_len);
  }
  std::vector<std::vector<int32_t>> prompts;
  for (const GsmProblem& problem : problems.asked) {
    NIBBLE_ASSIGN_OR_RETURN(
        std::vector<int32_t> prompt,
        session.tokenizer->encode_prompt(gsm8k_prompt(problems.examples, problem)));
    if (std::ssize(prompt) > room) {
      prompt.erase(prompt.begin(), prompt.end() - room);
    }
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

/// Which problems were solved, by 1 and 0.
struct Score {
  std::vector<double> strict;
  std::vector<double> flexible;
};

Score score(const Problems& problems, const std::vector<std::string>& answers) {
  Score out;
  for (size_t i = 0; i < answers.size(); ++i) {
    const std::string& reference = problems.asked[i].answer;
    out.strict.push_back(equals_reference(strict_answer(answers[i]), reference) ? 1 : 0);
    out.flexible.push_back(equals_reference(flexible_answer(answers[i]), reference) ? 1 : 0);
  }
  return out;
}

std::string sample_lines(const Problems& problems,
                         const std::vector<std::string>& answers,
                         const Score& score) {
  std::string out;
  for (size_t i = 0; i < answers.size(); ++i) {
    out += Json::object({{"question", problems.asked[i].question},
                         {"answer", answers[i]},
                         {"strict", score.strict[i] > 0},
                         {"flexible", score.flexible[i] > 0}})
               .dump() +
           "\n";
  }
  return out;
}

Status run(const Gsm8kFlags& flags) {
  const auto start = std::chrono::steady_clock::now();
  NIBBLE_ASSIGN_OR_RETURN(const Problems problems, read_problems(flags));
  NIBBLE_ASSIGN_OR_RETURN(const ServingSession session, open_engine(flags));
  NIBBLE_ASSIGN_OR_RETURN(const auto prompts, encode_prompts(problems, session, flags.max_tokens));
  ProgressDisplay display("answered", ProgressDisplay::Unit::kItems);
  const GenerationOptions options{
      .max_tokens = flags.max_tokens, .stops = gsm8k_stops(), .progress = [&](int64_t done) {
        display.update(done, std::ssize(prompts), "");
      }};
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> answers,
                          answer_all(*session.engine, *session.tokenizer, prompts, options));
  const Score found = score(problems, answers);
  if (!flags.samples.empty()) {
    NIBBLE_RETURN_IF_ERROR(write_text_file(flags.samples, sample_lines(problems, answers, found)));
  }
  const Estimate strict = estimate_of(found.strict);
  const Estimate flexible = estimate_of(found.flexible);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (flags.json) {
    print_out(Json::object({{"strict_match", strict.mean},
                            {"strict_match_error", strict.error},
                            {"flexible_match", flexible.mean},
                            {"flexible_match_error", flexible.error},
                            {"items", std::ssize(answers)},
                            {"fewshot", flags.fewshot},
                            {"kv_cache_dtype", kv_code_name(session.engine->options().kv_code)},
                            {"seconds", seconds}})
                  .dump() +
              "\n");
    return {};
  }
  print_out(fmt::format(
      "strict match {:.2f} +- {:.2f} %, flexible {:.2f} +- {:.2f} %, of {} problems, {} examples; "
      "{:.1f} s\n",
      100 * strict.mean, 100 * strict.error, 100 * flexible.mean, 100 * flexible.error,
      answers.size(), flags.fewshot, seconds));
  return {};
}

}  // namespace

void add_eval_gsm8k_command(CLI::App& eval, CommandContext& context) {
  auto flags = std::make_shared<Gsm8kFlags>();
  CLI::App* gsm = eval.add_subcommand("gsm8k", "Word problems, by the number that an answer gives");
  add_model_flags(*gsm, flags->model);
  gsm->add_option("--data", flags->data, "JSONL with question and answer")->required();
  gsm->add_option("--examples", flags->examples,
                  "The same, for the examples in front of every question (default: the first of "
                  "--data, which are then not asked)");
  gsm->add_option("--fewshot", flags->fewshot, "Examples")
      ->check(whole_number(0, 1000))
      ->capture_default_str();
  gsm->add_option("--limit", flags->limit, "Problems to ask; 0: all")
      ->check(whole_number(0))
      ->capture_default_str();
  gsm->add_option("--max-tokens", flags->max_tokens, "Longest answer, in tokens")
      ->check(whole_number(1))
      ->capture_default_str();
  gsm->add_option("--max-num-seqs", flags->max_num_seqs, "Answers at a time")
      ->check(whole_number(1, 4096))
      ->capture_default_str();
  gsm->add_option("--samples", flags->samples, "Write every answer to this JSONL file");
  gsm->add_flag("--json", flags->json,
                "Print one JSON object: strict_match, flexible_match, items, ...");
  gsm->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
