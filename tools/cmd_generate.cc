#include <cstdio>
#include <memory>

#include <unistd.h>

#include "answer.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "command.h"
#include "model_flags.h"
#include "output.h"

namespace nibble {

void add_generate_command(CLI::App& app, CommandContext& context);

namespace {

enum class Output { kText, kJson };

struct GenerateFlags {
  ModelFlags model;
  AnswerFlags answer;
  std::string prompt;
  Output output = Output::kText;
};

void stream_out(std::string_view text) {
  print_out(text);
  std::fflush(stdout);  // a failure shows at the end, in main
}

Json to_json(const Answer& answer, const ServingSession& session) {
  JsonArray tokens(answer.tokens.begin(), answer.tokens.end());
  return Json::object({{"text", answer.text},
                       {"tokens", std::move(tokens)},
                       {"prompt_tokens", answer.prompt_tokens},
                       {"finish_reason", answer.finish_reason},
                       {"ttft_ms", answer.ttft_ms},
                       {"tpot_ms", answer.tpot_ms},
                       {"load_ms", session.load_ms},
                       {"peak_rss_bytes", peak_rss_bytes()},
                       {"model", session.model_name},
                       {"scheme", session.scheme},
                       {"backend", session.backend_name}});
}

Status run(const GenerateFlags& flags) {
  NIBBLE_ASSIGN_OR_RETURN(ServingSession session, open_session(flags.model));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> prompt,
                          session.tokenizer->encode_prompt(flags.prompt));
  AnswerRequest request{.prompt = std::move(prompt),
                        .max_tokens = flags.answer.max_tokens,
                        .sampling = sampling_of(flags.answer, session.config, 0),
                        .stop = flags.answer.stop};
  if (flags.output == Output::kText && isatty(STDOUT_FILENO) == 1) {
    request.on_text = stream_out;
  }
  const bool streamed = static_cast<bool>(request.on_text);
  NIBBLE_ASSIGN_OR_RETURN(const Answer answer, ask(session, std::move(request)));
  if (flags.output == Output::kJson) {
    print_out(to_json(answer, session).dump() + "\n");
    return {};
  }
  if (!streamed) {
    print_out(answer.text);
  }
  print_out("\n");
  NIBBLE_LOG(kInfo,
             "{} prompt + {} answer tokens ({}); load {:.0f} ms, first token {:.1f} ms, then "
             "{:.2f} ms per token; {} on {}",
             answer.prompt_tokens, answer.tokens.size(), answer.finish_reason, session.load_ms,
             answer.ttft_ms, answer.tpot_ms, session.scheme, session.backend_name);
  return {};
}

}  // namespace

void add_generate_command(CLI::App& app, CommandContext& context) {
  constexpr int64_t kMaxTokens = 256;
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app.add_subcommand("generate", "Continue a text");
  add_model_flags(*command, flags->model);
  command->add_option("--prompt", flags->prompt, "The text to continue")->required();
  add_answer_flags(*command, flags->answer, kMaxTokens);
  command->add_flag_callback(
      "--json", [flags] { flags->output = Output::kJson; },
      "Print one JSON object: text, tokens, prompt_tokens, finish_reason, ttft_ms, tpot_ms, ...");
  command->footer(
      "Without --temperature and a default in generation_config.json, the answer is greedy.\n\n" +
      app.get_footer());
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
