#include "serve_flags.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "flag_checks.h"
#include "model_flags.h"

namespace nibble {
namespace {

constexpr int64_t kMostPort = 65535;
constexpr const char* kCompatibility = "Flags of other servers";
constexpr const char* kOneDevice = "this server computes on one device";

/// A flag of vLLM or SGLang that takes a value. Values in `accepted` change nothing here, all
/// others are refused.
struct ForeignFlag {
  const char* names;
  std::vector<std::string> accepted;
  const char* reason;
};

const std::vector<ForeignFlag>& foreign_flags() {
  static const std::vector<ForeignFlag> kFlags = {
      {"--ssl-keyfile", {}, "put a proxy that speaks TLS in front of the server"},
      {"--ssl-certfile", {}, "put a proxy that speaks TLS in front of the server"},
      {"--dtype", {"auto"}, "the types of the checkpoint are used"},
      {"--quantization",
       {"auto", "compressed-tensors"},
       "the scheme is read from the checkpoint; make another one with nibble quantize"},
      {"--load-format", {"auto", "safetensors"}, "models are read from safetensors"},
      {"--kv-cache-dtype-skip-layers", {}, "all layers use --kv-cache-dtype"},
      {"--gpu-memory-utilization,--mem-fraction-static",
       {},
       "the cache takes what a GPU has left; bound it with --kv-cache-memory"},
      {"--tensor-parallel-size,--tp", {"1"}, kOneDevice},
      {"--pipeline-parallel-size,--pp", {"1"}, kOneDevice},
      {"--data-parallel-size,--dp", {"1"}, kOneDevice},
      {"--nnodes", {"1"}, kOneDevice},
      {"--node-rank", {"0"}, kOneDevice},
      {"--dist-init-addr", {}, kOneDevice},
      {"--max-cudagraph-capture-size", {"0"}, kOneDevice},
      {"--otlp-traces-endpoint", {}, "there are no traces; scrape /metrics"},
      {"--config", {}, "give flags, or the variables that --help names"},
  };
  return kFlags;
}

void add_foreign_flags(CLI::App& command, ServeFlags& flags) {
  for (const ForeignFlag& flag : foreign_flags()) {
    const std::string names = flag.names;
    const std::string name = names.substr(0, names.find(','));
    const auto take = [&flags, &flag, name](const std::string& value) {
      if (std::find(flag.accepted.begin(), flag.accepted.end(), value) == flag.accepted.end()) {
        flags.refusals.push_back(
            fmt::format("{} {} is not supported: {}", name, value, flag.reason));
      }
    };
    const std::string help =
        flag.accepted.empty()
            ? fmt::format("Refused: {}", flag.reason)
            : fmt::format("Only {}: {}", fmt::join(flag.accepted, ", "), flag.reason);
    command.add_option_function<std::string>(names, take, help)->group(kCompatibility);
  }
  const auto bare = [&](const std::string& name, const std::string& help) {
    command.add_flag(name, help)->group(kCompatibility);
  };
  bare("--trust-remote-code", "Accepted without effect: no code of a model is ever run");
  command
      .add_flag_callback(
          "--enforce-eager", [&flags] { flags.session.backend.cuda.record_steps = false; },
          "Launch every kernel of a GPU's decode steps anew instead of CUDA graphs")
      ->group(kCompatibility);
  bare("--enable-auto-tool-choice",
       "Accepted without effect: answers are always searched for calls of a request's tools");
  bare("--enable-metrics", "Accepted without effect: /metrics is always there");
  const auto refuse = [&](const char* name, const char* reason) {
    command
        .add_flag_callback(
            name,
            [&flags, name, reason] {
              flags.refusals.push_back(fmt::format("{} is not supported: {}", name, reason));
            },
            fmt::format("Refused: {}", reason))
        ->group(kCompatibility);
  };
  refuse("--enable-expert-parallel", kOneDevice);
}

void add_http_flags(CLI::App& command, ServeFlags& flags) {
  command.add_option("--host", flags.http.host, "Address to listen on; 0.0.0.0: all")
      ->envname("NIBBLE_HOST")
      ->capture_default_str();
  command.add_option("--port", flags.http.port, "Port to listen on; 0: any free one")
      ->check(whole_number(0, kMostPort))
      ->envname("NIBBLE_PORT")
      ->capture_default_str();
  command
      .add_option("--api-key", flags.api_keys,
                  "Key that clients must send as Bearer (may be repeated: each key is served in "
                  "turn)")
      ->allow_extra_args(false)
      ->envname("NIBBLE_API_KEY");
  command
      .add_option("--api-key-file", flags.api_key_file,
                  "File with a key on each line, if wanted with its name and its share behind it")
      ->envname("NIBBLE_API_KEY_FILE");
  command
      .add_option("--request-timeout", flags.request_timeout_s,
                  "Most seconds that a request may wait and run, its own timeout included; 0: as "
                  "long as it takes")
      ->envname("NIBBLE_REQUEST_TIMEOUT")
      ->check(number_of_at_least_0())
      ->capture_default_str();
  command
      .add_option("--shutdown-timeout", flags.shutdown_timeout_s,
                  "Seconds that running requests get after SIGTERM")
      ->envname("NIBBLE_SHUTDOWN_TIMEOUT")
      ->check(number_of_at_least_0())
      ->capture_default_str();
  command
      .add_option("--stream-interval", flags.stream_interval,
                  "Tokens that a stream sends at a time")
      ->envname("NIBBLE_STREAM_INTERVAL")
      ->check(whole_number(1))
      ->capture_default_str();
  command
      .add_flag("--strict", flags.strict,
                "Refuse request fields that are unknown or without effect")
      ->envname("NIBBLE_STRICT");
}

constexpr const char* kCors = "Pages of browsers (CORS; off without --allowed-origins)";

/// The texts of a JSON array, as vLLM's flags have it, or the text itself. Nothing if it is
/// neither.
std::optional<std::vector<std::string>> list_of(const std::string& text) {
  if (!text.starts_with('[')) {
    return std::vector{text};
  }
  const Result<Json> array = Json::parse(text);
  if (!array.ok()) {
    return std::nullopt;
  }
  std::vector<std::string> list;
  for (const Json& one : array->as_array()) {
    if (!one.is_string()) {
      return std::nullopt;
    }
    list.push_back(one.as_string());
  }
  return list;
}

void add_cors_flags(CLI::App& command, ServeFlags& flags) {
  const auto add = [&](const std::string& name, std::vector<std::string>& list, const char* help) {
    const auto take = [&flags, &list, name](const std::string& text) {
      if (auto given = list_of(text)) {
        list = *std::move(given);
      } else {
        flags.refusals.push_back(
            fmt::format("{} {} is not a JSON array of texts such as [\"*\"]", name, text));
      }
    };
    return command.add_option_function<std::string>(name, take, help)->group(kCors);
  };
  CorsOptions& cors = flags.http.cors;
  add("--allowed-origins", cors.origins,
      "Origins that may use the server, as a JSON array or one alone; *: all")
      ->envname("NIBBLE_ALLOWED_ORIGINS");
  add("--allowed-methods", cors.methods, "Methods that they may use (default: all)")
      ->envname("NIBBLE_ALLOWED_METHODS");
  add("--allowed-headers", cors.headers, "Headers that they may send (default: all)")
      ->envname("NIBBLE_ALLOWED_HEADERS");
  command.add_flag("--allow-credentials", cors.credentials, "They may send cookies")
      ->envname("NIBBLE_ALLOW_CREDENTIALS")
      ->group(kCors);
}

void add_model_flags(CLI::App& command, ServeFlags& flags) {
  command.add_option("MODEL,--model", flags.model_dir, "Model folder in Hugging Face format")
      ->envname("NIBBLE_MODEL")
      ->required();
  command
      .add_option("--served-model-name", flags.names,
                  "Names that requests may use (default: the folder's name and path)")
      ->envname("NIBBLE_SERVED_MODEL_NAME");
  command
      .add_option("--tokenizer", flags.session.tokenizer_dir,
                  "Folder of the tokenizer and chat template (default: the model's)")
      ->envname("NIBBLE_TOKENIZER");
  command
      .add_option("--chat-template", flags.chat_template,
                  "File with the Jinja template to use instead of the model's")
      ->envname("NIBBLE_CHAT_TEMPLATE");
  command
      .add_option("--default-chat-template-kwargs", flags.template_arguments,
                  "JSON object of variables for the chat template; chat_template_kwargs of a "
                  "request come before them")
      ->envname("NIBBLE_DEFAULT_CHAT_TEMPLATE_KWARGS");
  command
      .add_option("--tool-call-parser", flags.tool_parser,
                  "How the model writes calls of tools: auto (by its vocabulary and template), "
                  "none, hermes, llama3-json, mistral, kimi-k2, deepseek-v31, gpt-oss, and the "
                  "names of vLLM and SGLang for these")
      ->capture_default_str()
      ->envname("NIBBLE_TOOL_CALL_PARSER");
  command
      .add_option("--reasoning-parser", flags.reasoning_parser,
                  "How it marks what it thinks: auto, none, think, mistral, gpt-oss, and the names "
                  "of vLLM and SGLang for these")
      ->capture_default_str()
      ->envname("NIBBLE_REASONING_PARSER");
  command
      .add_option("--pooling", flags.pooling,
                  "What embeddings are made of: the hidden state of the last token, or the mean of "
                  "all; auto: as the model's files say, else last")
      ->check(CLI::IsMember({"auto", "last", "mean"}))
      ->capture_default_str()
      ->envname("NIBBLE_POOLING");
  command
      .add_option("--generation-config", flags.generation_config,
                  "Sampling defaults: auto takes the model's generation_config.json")
      ->envname("NIBBLE_GENERATION_CONFIG")
      ->check(CLI::IsMember({"auto", "none"}))
      ->capture_default_str();
}

/// How large steps become.
void add_step_flags(CLI::App& command, ServeFlags& flags) {
  EngineOptions& engine = flags.session.engine;
  const auto size = [&](const std::string& name, int64_t& value, const char* variable,
                        const char* help) {
    command.add_option(name, value, help)->envname(variable)->check(whole_number(1));
  };
  size("--max-num-seqs,--max-running-requests", engine.max_num_seqs, "NIBBLE_MAX_NUM_SEQS",
       "Requests that run at once (default: what suits the device and --prefer, 64 or 128 on CPUs "
       "and up to 256 or 512 on GPUs)");
  size("--max-num-batched-tokens,--chunked-prefill-size", engine.max_num_batched_tokens,
       "NIBBLE_MAX_NUM_BATCHED_TOKENS",
       "Tokens of one step (default: 512 or 2048 on CPUs and up to 8192 or 16384 on GPUs)");
  command
      .add_option("--prefer", flags.prefer,
                  "What steps are made for: ttft reads new prompts as soon as they fit, tpot reads "
                  "few tokens of them where others decode, throughput makes the largest steps")
      ->envname("NIBBLE_PREFER")
      ->check(CLI::IsMember(preference_names()))
      ->capture_default_str();
}

void add_engine_flags(CLI::App& command, ServeFlags& flags) {
  EngineOptions& engine = flags.session.engine;
  const auto count = [&](const std::string& name, int64_t& value, const char* variable,
                         const char* help) {
    command.add_option(name, value, help)
        ->envname(variable)
        ->check(whole_number(0))
        ->capture_default_str();
  };
  count("-c,--max-model-len,--context-length", engine.max_model_len, "NIBBLE_MAX_MODEL_LEN",
        "Longest prompt and answer together, in tokens; 0: the model's");
  add_step_flags(command, flags);
  count("--max-queued-requests", engine.max_queued_requests, "NIBBLE_MAX_QUEUED_REQUESTS",
        "Requests of one key that may wait; more are answered with 429");
  count("--block-size,--page-size", engine.page_size, "NIBBLE_BLOCK_SIZE",
        "Tokens of one page of the KV cache");
  command
      .add_option("--kv-cache-memory", engine.kv_bytes, "Most memory for the KV cache, e.g. 2GiB")
      ->envname("NIBBLE_KV_CACHE_MEMORY")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  command
      .add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", engine.prefix_caching,
                "Share the pages of equal prompt beginnings (default: on)")
      ->envname("NIBBLE_ENABLE_PREFIX_CACHING");
  command
      .add_option("--kv-cache-dtype", flags.kv_cache_dtype,
                  "Keys and values are kept in this type (auto: what the checkpoint's type "
                  "needs, bf16 for BF16 and f32 for F16 and F32)")
      ->envname("NIBBLE_KV_CACHE_DTYPE")
      ->check(CLI::IsMember(kv_cache_dtypes()))
      ->capture_default_str();
  command
      .add_option("--seed", engine.seed,
                  "Random numbers of requests without a seed begin here (default: the system's)")
      ->envname("NIBBLE_SEED");
  command
      .add_option(
          "--speculative-config", flags.speculative_config,
          "Propose tokens ahead and verify them in one step, on CPUs: JSON with method (ngram, "
          "which looks the last ones up in prompt and answer, or draft_model), "
          "num_speculative_tokens, and prompt_lookup_max and prompt_lookup_min, or model, the "
          "folder of a smaller model")
      ->envname("NIBBLE_SPECULATIVE_CONFIG");
  CpuBackendOptions& backend = flags.session.backend.cpu;
  add_thread_flags(command, {backend.threads, backend.pinning, backend.numa});
  command.get_option("--threads")->envname("NIBBLE_THREADS");
  command.get_option("--pin")->envname("NIBBLE_PIN");
  command.get_option("--numa")->envname("NIBBLE_NUMA");
  add_kernel_flags(command, backend.isa, backend.exact_activations);
  command.get_option("--isa")->envname("NIBBLE_ISA");
  command.get_option("--exact-activations")->envname("NIBBLE_EXACT_ACTIVATIONS");
  add_fmpq_flag(command, engine.ignore_fmpq);
  command.get_option("--ignore-fmpq")->envname("NIBBLE_IGNORE_FMPQ");
  add_kernel_choice(command, flags.session.backend.kernels);
  command.get_option("--kernel")->envname("NIBBLE_KERNEL");
  add_device_flags(command, flags.session.backend.device, flags.session.backend.cuda_library);
  command.get_option("--device")->envname("NIBBLE_DEVICE");
  command.get_option("--cuda-library")->envname("NIBBLE_CUDA_LIBRARY");
}

}  // namespace

void add_serve_flags(CLI::App& command, ServeFlags& flags) {
  add_model_flags(command, flags);
  add_http_flags(command, flags);
  add_cors_flags(command, flags);
  add_engine_flags(command, flags);
  add_foreign_flags(command, flags);
}

Status check_refusals(const ServeFlags& flags) {
  return flags.refusals.empty() ? Status()
                                : Status(StatusCode::kUnsupported, flags.refusals.front());
}

Result<Json> template_arguments_of(const ServeFlags& flags) {
  if (flags.template_arguments.empty()) {
    return Json();
  }
  Result<Json> json = Json::parse(flags.template_arguments);
  if (!json.ok() || !json->is_object()) {
    return make_error(StatusCode::kInvalidArgument,
                      "--default-chat-template-kwargs: expected a JSON object such as "
                      "{{\"enable_thinking\": false}}{}{}",
                      json.ok() ? "" : ": ", json.ok() ? "" : json.status().message());
  }
  return json;
}

}  // namespace nibble
