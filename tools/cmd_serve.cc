#include <algorithm>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include <sys/resource.h>

#include "base/file.h"
#include "base/log.h"
#include "command.h"
#include "engine/session.h"
#include "flag_checks.h"
#include "server/app.h"
#include "server/error.h"
#include "server/text_frontend.h"

namespace nibble {

void add_serve_command(CLI::App& app, CommandContext& context);

namespace {

constexpr int64_t kMostPort = 65535;
constexpr rlim_t kWantedDescriptors = 20000;
constexpr double kFlushSeconds = 2;  // for the last answers to reach their clients

struct Flags {
  std::string model_dir;
  std::vector<std::string> names;
  std::string api_key;
  HttpOptions http;
  SessionOptions session;
  std::string kv_cache_dtype = "auto";
  std::string chat_template;
  std::string generation_config = "auto";
  double shutdown_timeout_s = 30;
  bool strict = false;
};

/// Lets as many clients connect as the system allows.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < kWantedDescriptors) {
    limit.rlim_cur = std::min(kWantedDescriptors, limit.rlim_max);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
      NIBBLE_LOG(kWarning, "cannot raise the limit of open files");
    }
  }
}

/// SIGINT and SIGTERM, blocked in this thread and in those it starts.
class ShutdownSignals final {
 public:
  ShutdownSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  /// Waits for the first; the next one ends the process at once.
  void wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    NIBBLE_LOG(kInfo, "signal {}: finishing what runs; once more to stop at once", signal);
    pthread_sigmask(SIG_UNBLOCK, &set_, nullptr);
  }

 private:
  sigset_t set_{};
};

SamplingParams sampling_defaults(const Flags& flags, const ModelConfig& config) {
  if (flags.generation_config == "none") {
    return {};
  }
  const SamplingParams sampling = default_sampling(config, {});
  NIBBLE_LOG(kInfo,
             "sampling defaults: temperature {}, top_p {}, top_k {}, repetition_penalty {} "
             "(--generation-config none: 1, 1, 0, 1)",
             sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty);
  return sampling;
}

Status use_chat_template(const std::string& path, ServingSession& session) {
  if (!path.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(std::string source, read_file(path));
    NIBBLE_ASSIGN_OR_RETURN(session.chat_template, ChatTemplate::parse(std::move(source), path));
  }
  return {};
}

/// Answers until a signal; then lets what runs finish.
Status serve_until_signal(const Flags& flags,
                          const ShutdownSignals& signals,
                          ServingSession& session,
                          const TextFrontend& text) {
  AppOptions options{.model_names = flags.names,
                     .api_key = flags.api_key,
                     .version = NIBBLE_VERSION,
                     .created = std::time(nullptr)};
  options.schema = {.strictness = flags.strict ? Strictness::kStrict : Strictness::kLenient,
                    .defaults = sampling_defaults(flags, session.config)};
  if (options.model_names.empty()) {
    options.model_names = {session.model_name, flags.model_dir};
  }
  AppContext context(std::move(options), *session.engine, text);
  NIBBLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<HttpServer> server,
      HttpServer::start(
          flags.http, [&context](const auto& exchange) { handle_request(context, exchange); },
          [](int status, const std::string& message) {
            return error_response({status, message, "", ""});
          }));
  fmt::print(stderr, "nibble: serving {} ({}) at http://{}:{}/v1\n",
             context.options.model_names.front(), session.scheme, flags.http.host, server->port());
  signals.wait();
  context.ready = false;
  server->begin_drain();
  session.engine->drain(flags.shutdown_timeout_s);
  if (!server->wait_idle(kFlushSeconds)) {
    NIBBLE_LOG(kWarning, "closing connections whose clients do not");
  }
  return {};
}

Status run(Flags& flags) {
  raise_descriptor_limit();
  const ShutdownSignals signals;
  NIBBLE_ASSIGN_OR_RETURN(flags.session.engine.kv_code, parse_kv_cache_dtype(flags.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(ServingSession session, open_session(flags.model_dir, flags.session));
  NIBBLE_RETURN_IF_ERROR(use_chat_template(flags.chat_template, session));
  const TextFrontend text(session.tokenizer, session.chat_template, session.no_template);
  return serve_until_signal(flags, signals, session, text);
}

void add_http_flags(CLI::App& command, Flags& flags) {
  command.add_option("--host", flags.http.host, "Address to listen on; 0.0.0.0: all")
      ->envname("NIBBLE_HOST")
      ->capture_default_str();
  command.add_option("--port", flags.http.port, "Port to listen on; 0: any free one")
      ->check(whole_number(0, kMostPort))
      ->envname("NIBBLE_PORT")
      ->capture_default_str();
  command
      .add_option("--served-model-name", flags.names,
                  "Names that requests may use (default: the folder's name and path)")
      ->envname("NIBBLE_SERVED_MODEL_NAME");
  command.add_option("--api-key", flags.api_key, "Key that clients must send as Bearer")
      ->envname("NIBBLE_API_KEY");
  command
      .add_option("--shutdown-timeout", flags.shutdown_timeout_s,
                  "Seconds that running requests get after SIGTERM")
      ->envname("NIBBLE_SHUTDOWN_TIMEOUT")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command.add_flag("--strict", flags.strict, "Refuse request fields that are unknown")
      ->envname("NIBBLE_STRICT");
  command
      .add_option("--chat-template", flags.chat_template,
                  "File with the Jinja template to use instead of the model's")
      ->envname("NIBBLE_CHAT_TEMPLATE");
  command
      .add_option("--generation-config", flags.generation_config,
                  "Sampling defaults: auto takes the model's generation_config.json")
      ->envname("NIBBLE_GENERATION_CONFIG")
      ->check(CLI::IsMember({"auto", "none"}))
      ->capture_default_str();
}

void add_engine_flags(CLI::App& command, Flags& flags) {
  EngineOptions& engine = flags.session.engine;
  const auto count = [&](const std::string& name, int64_t& value, const char* variable,
                         const char* help) {
    command.add_option(name, value, help)
        ->envname(variable)
        ->check(whole_number(0))
        ->capture_default_str();
  };
  count("--max-model-len,--context-length", engine.max_model_len, "NIBBLE_MAX_MODEL_LEN",
        "Longest prompt and answer together, in tokens; 0: the model's");
  count("--max-num-seqs,--max-running-requests", engine.max_num_seqs, "NIBBLE_MAX_NUM_SEQS",
        "Requests that run at once");
  count("--max-num-batched-tokens,--chunked-prefill-size", engine.max_num_batched_tokens,
        "NIBBLE_MAX_NUM_BATCHED_TOKENS", "Tokens of one step");
  count("--max-queued-requests", engine.max_queued_requests, "NIBBLE_MAX_QUEUED_REQUESTS",
        "Requests that may wait; more are answered with 429");
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
                  "Keys and values are kept in this type (auto: bf16)")
      ->envname("NIBBLE_KV_CACHE_DTYPE")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "int8", "int4"}))
      ->capture_default_str();
  command
      .add_option("--threads", flags.session.backend.threads, "Computing threads; 0: one per core")
      ->envname("NIBBLE_THREADS")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  command.add_option("--isa", flags.session.backend.isa, "Instruction set of the kernels")
      ->envname("NIBBLE_ISA")
      ->check(CLI::IsMember({"auto", "scalar", "avx2", "avx512", "avx512_vnni"}))
      ->capture_default_str();
}

}  // namespace

void add_serve_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command =
      app.add_subcommand("serve", "Serve a model to OpenAI clients until SIGTERM or Ctrl-C");
  command->add_option("MODEL", flags->model_dir, "Model folder in Hugging Face format")->required();
  add_http_flags(*command, *flags);
  add_engine_flags(*command, *flags);
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
