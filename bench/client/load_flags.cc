#include "bench/client/load_flags.h"

#include "tools/flag_checks.h"

namespace nibble {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 24;

class Adder final {
 public:
  explicit Adder(CLI::App& command) : command_(command) {}
  template <typename T>
  CLI::Option* add(const char* name, T& value, const char* help) {
    return command_.add_option(name, value, help)->capture_default_str();
  }
  CLI::Option* number(const char* name, int64_t& value, const char* help, int64_t least) {
    return add(name, value, help)->check(whole_number(least, kMostTokens));
  }

 private:
  CLI::App& command_;
};

void add_server_flags(CLI::App& command, LoadFlags& flags) {
  Adder flag(command);
  flag.add("--base-url", flags.base_url, "URL of the server, in place of --host and --port");
  flag.add("--host", flags.host, "Host of the server");
  flag.number("--port", flags.port, "Port of the server", 1)->check(whole_number(1, 65535));
  flag.add("--backend", flags.backend,
           "How it is asked: openai (or vllm, sglang-oai: completions), openai-chat (or "
           "sglang-oai-chat), sglang (/generate)")
      ->check(CLI::IsMember(
          {"openai", "openai-chat", "vllm", "sglang", "sglang-oai", "sglang-oai-chat"}));
  flag.add("--endpoint", flags.endpoint,
           "Route, where it is not the backend's usual one; one that ends in chat/completions "
           "makes openai a chat");
  flag.add("--model", flags.model, "Model to ask for (default: the first of /v1/models)");
  flag.add("--tokenizer", flags.tokenizer,
           "Model folder with the server's tokenizer: for random text and for answers without "
           "usage");
  flag.add("--api-key", flags.api_key, "Sent as a bearer token")->envname("OPENAI_API_KEY");
  flag.add("--header", flags.headers, "KEY=VALUE to send with each request (may be repeated)")
      ->allow_extra_args(false);
  flag.add("--ready-check-timeout-sec", flags.ready_s,
           "Seconds to wait for the server to answer a first request");
  flag.add("--stall-timeout", flags.stall_s, "Seconds without a byte that end a request")
      ->check(positive_number());
  flag.add("--connect-timeout", flags.connect_s, "Seconds for a connection")
      ->check(positive_number());
}

void add_data_flags(CLI::App& command, LoadFlags& flags) {
  Adder flag(command);
  flag.add("--dataset-name", flags.dataset,
           "random, random-ids (the same), sharegpt, custom (JSONL), gsm8k")
      ->check(CLI::IsMember({"random", "random-ids", "sharegpt", "custom", "gsm8k"}));
  flag.add("--dataset-path", flags.dataset_path,
           "File of sharegpt, custom and gsm8k; with random: ShareGPT prompts, cut or repeated");
  flag.number("--num-prompts", flags.num_prompts, "Requests", 1);
  flag.number("--random-input-len", flags.input_len, "Tokens of a random prompt", 1);
  flag.number("--random-output-len", flags.output_len, "Tokens of its answer", 1);
  flag.add("--random-range-ratio", flags.range_ratio, "How much these lengths vary");
  flag.add("--random-range-semantics", flags.range_semantics,
           "What that ratio R makes of a length L: vllm: from L(1-R) to L(1+R), sglang: from L R "
           "to L (default: as --layout)")
      ->check(CLI::IsMember({"vllm", "sglang"}));
  flag.number("--random-prefix-len", flags.prefix_len, "Tokens that all prompts share", 0);
  flag.add("--prompt-form", flags.prompt_form, "Random prompts are sent as text or as token ids")
      ->check(CLI::IsMember({"text", "ids"}));
  flag.number("--vocab-size", flags.vocab_size,
              "Without --tokenizer: random prompts are token ids below this number", 0);
  flag.number("--output-len,--sharegpt-output-len,--custom-output-len", flags.fixed_output,
              "Tokens of every answer to a file's prompts, the longest to gsm8k; 0: as the file "
              "says, 512 for gsm8k",
              0);
  command.add_option("--seed", flags.seed, "Of prompts, lengths and arrivals")
      ->check(whole_number(0))
      ->capture_default_str();
  flag.add("--gsm8k-examples", flags.gsm8k_examples,
           "JSONL for the examples of gsm8k (default: the first of --dataset-path)");
  flag.number("--fewshot", flags.fewshot, "Examples in front of every question of gsm8k", 0);
}

void add_traffic_flags(CLI::App& command, LoadFlags& flags) {
  Adder flag(command);
  flag.add("--request-rate", flags.request_rate, "Requests a second, or inf: all at once");
  flag.add("--burstiness", flags.burstiness,
           "Shape of the gaps' gamma distribution; 1: a Poisson process")
      ->check(positive_number());
  flag.add("--ramp-up-strategy", flags.ramp_up, "The rate grows from request to request")
      ->check(CLI::IsMember({"linear", "exponential"}));
  flag.add("--ramp-up-start-rps", flags.ramp_start, "Rate at the first request");
  flag.add("--ramp-up-end-rps", flags.ramp_end, "Rate at the last request");
  flag.number("--max-concurrency", flags.max_concurrency, "Most requests at a time; 0: any", 0);
  flag.number("--num-warmups", flags.num_warmups,
              "Requests before the measured ones, of prompts of their own", 0);
  command.add_flag("--ignore-eos", flags.ignore_eos, "Ask for answers of the full length");
  command.add_flag("--disable-ignore-eos", flags.disable_ignore_eos,
                   "With --layout sglang, which asks for them: do not");
  command.add_option("--temperature", flags.temperature,
                     "Of the answers (default: the server's; 0 with --layout sglang)");
  flag.add("--extra-body,--extra-request-body", flags.extra_body,
           "JSON object whose fields every request gets");
}

void add_result_flags(CLI::App& command, LoadFlags& flags) {
  Adder flag(command);
  flag.add("--layout", flags.layout, "Table, keys and definitions of vLLM's or SGLang's client")
      ->check(CLI::IsMember({"vllm", "sglang"}));
  flag.add("--percentile-metrics", flags.percentile_metrics, "Sections of vLLM's table");
  flag.add("--metric-percentiles", flags.percentiles, "Percentiles of each, such as 50,90,99.9");
  flag.add("--goodput", flags.goodput,
           "Most ms of a good request: ttft:200 tpot:50 e2el:3000 (one or more)");
  flag.add("--result-file,--result-filename,--output-file", flags.result_file,
           "Write the numbers as JSON; with --layout sglang a line is appended");
  command.add_flag("--save-detailed,--output-details", flags.save_detailed,
                   "The result file has lists with an entry for each request");
  flag.add("--report", flags.report, "Write a web page with charts to this file");
  flag.add("--sweep", flags.sweep,
           "Measure several loads in turn: rate=1,2,4,inf or concurrency=1,8,64");
  flag.add("--compare", flags.compare,
           "Two URLs, A and B: both are measured in turns, with the same prompts")
      ->expected(2);
  flag.number("--rounds", flags.rounds, "Turns of --compare", 1);
  command.add_flag("--json", flags.json, "Print one JSON object in place of the table");
}

}  // namespace

void add_load_flags(CLI::App& command, LoadFlags& flags) {
  add_server_flags(command, flags);
  add_data_flags(command, flags);
  add_traffic_flags(command, flags);
  add_result_flags(command, flags);
}

}  // namespace nibble
