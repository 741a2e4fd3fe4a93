#include <algorithm>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include <sys/resource.h>

#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "base/thread_name.h"
#include "command.h"
#include "engine/session.h"
#include "serve_flags.h"
#include "server/app.h"
#include "server/gate.h"
#include "server/text_frontend.h"

namespace nibble {

void add_serve_command(CLI::App& app, CommandContext& context);

namespace {

constexpr rlim_t kWantedDescriptors = 20000;
constexpr double kFlushSeconds = 2;  // for the last answers to reach their clients

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
  /// Runs `task` on a thread of its own, and lets a signal end the process meanwhile.
  template <typename Task>
  auto interruptible(Task task) const {
    auto result = std::async(std::launch::async, std::move(task));
    pthread_sigmask(SIG_UNBLOCK, &set_, nullptr);
    result.wait();
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    return result.get();
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

SamplingParams sampling_defaults(const ServeFlags& flags, const ModelConfig& config) {
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
    NIBBLE_ASSIGN_OR_RETURN(session.chat_template, ChatTemplate::parse(source, path));
  }
  return {};
}

/// By the model's vocabulary and template, unless flags say otherwise.
Result<AnswerForm> answer_form(const ServeFlags& flags, const ServingSession& session) {
  const std::string source = session.chat_template ? session.chat_template->source() : "";
  AnswerForm form = detect_answer_form(*session.tokenizer, source);
  if (flags.reasoning_parser != "auto") {
    const auto found = find_reasoning_form(flags.reasoning_parser);
    NIBBLE_RETURN_IF_ERROR(found.status().with_context("--reasoning-parser"));
    form.reasoning = *found;
  }
  if (flags.tool_parser != "auto") {
    const auto found = find_tool_form(flags.tool_parser);
    NIBBLE_RETURN_IF_ERROR(found.status().with_context("--tool-call-parser"));
    form.tools = *found;
  }
  NIBBLE_LOG(kInfo,
             "answers: reasoning as {} (--reasoning-parser), tools as {} "
             "(--tool-call-parser)",
             reasoning_form_name(form.reasoning), tool_form_name(form.tools));
  return form;
}

/// What cannot be made embeddings of answers chats all the same.
void use_embedding_form(const ServeFlags& flags, AppOptions& options) {
  std::optional<Pooling> asked;
  if (flags.pooling != "auto") {
    asked = flags.pooling == "mean" ? Pooling::kMean : Pooling::kLast;
  }
  auto form = read_embedding_form(flags.model_dir, asked);
  if (form.ok()) {
    options.embedding = std::move(form).value();
    NIBBLE_LOG(kInfo, "embeddings: {} (--pooling)", pooling_name(options.embedding.pooling));
  } else {
    options.no_embeddings = form.status();
    NIBBLE_LOG(kWarning, "no embeddings: {}", form.status().message());
  }
}

Result<AppOptions> app_options(const ServeFlags& flags, const ServingSession& session) {
  AppOptions options{.model_names = flags.names,
                     .api_keys = flags.keys,
                     .version = NIBBLE_VERSION,
                     .created = std::time(nullptr),
                     .stream_interval = flags.stream_interval,
                     .request_timeout_s = flags.request_timeout_s};
  options.schema = {.strictness = flags.strict ? Strictness::kStrict : Strictness::kLenient,
                    .defaults = sampling_defaults(flags, session.config)};
  NIBBLE_ASSIGN_OR_RETURN(options.schema.template_arguments, template_arguments_of(flags));
  NIBBLE_ASSIGN_OR_RETURN(options.form, answer_form(flags, session));
  use_embedding_form(flags, options);
  options.model_path = flags.model_dir;
  options.tokenizer_path =
      flags.session.tokenizer_dir.empty() ? flags.model_dir : flags.session.tokenizer_dir;
  if (options.model_names.empty()) {
    options.model_names = {session.model_name, flags.model_dir};
  }
  return options;
}

/// Says how large steps become, and who decided it.
void log_steps(const EngineOptions& asked, const ServingSession& session) {
  const EngineOptions& options = session.engine->options();
  const std::string device =
      fmt::format("for {} with --prefer {}", session.backend->host_memory() ? "CPUs" : "this GPU",
                  preference_name(options.prefer));
  const auto reason = [&](int64_t value, const char* flag) {
    return value > 0 ? std::string(flag) : device;
  };
  NIBBLE_LOG(kInfo,
             "steps: {} sequences ({}), {} tokens ({}), of which prompts have {} where others "
             "decode",
             options.max_num_seqs, reason(asked.max_num_seqs, "--max-num-seqs"),
             options.max_num_batched_tokens,
             reason(asked.max_num_batched_tokens, "--max-num-batched-tokens"),
             options.max_mixed_prefill);
}

Result<ServingSession> load(const ServeFlags& flags) {
  SessionOptions options = flags.session;
  options.engine.warm_up = true;
  if (!flags.speculative_config.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(options.engine.speculation,
                            parse_speculation(flags.speculative_config));
  }
  NIBBLE_ASSIGN_OR_RETURN(ServingSession session, open_session(flags.model_dir, options));
  NIBBLE_RETURN_IF_ERROR(use_chat_template(flags.chat_template, session));
  NIBBLE_RETURN_IF_ERROR(prove_engine(*session.engine));
  log_steps(options.engine, session);
  return session;
}

/// Answers until a signal; then lets what runs finish.
void serve_until_signal(const ServeFlags& flags,
                        const ShutdownSignals& signals,
                        HttpServer& server,
                        AppContext& context) {
  fmt::print(stderr, "nibble: serving {} at http://{}:{}/v1\n", context.options.model_names.front(),
             flags.http.host, server.port());
  signals.wait();
  context.ready = false;
  server.begin_drain();
  context.engine.drain(flags.shutdown_timeout_s);
  server.stop_listening();
  if (!server.wait_idle(kFlushSeconds)) {
    NIBBLE_LOG(kWarning, "closing connections whose clients do not");
  }
}

Status run(ServeFlags& flags) {
  NIBBLE_RETURN_IF_ERROR(check_refusals(flags));
  raise_descriptor_limit();
  bound_free_memory();
  const ShutdownSignals signals;
  NIBBLE_ASSIGN_OR_RETURN(flags.session.kv_code, parse_kv_cache_dtype(flags.kv_cache_dtype));
  NIBBLE_ASSIGN_OR_RETURN(flags.session.engine.prefer, parse_preference(flags.prefer));
  NIBBLE_ASSIGN_OR_RETURN(flags.keys, read_api_keys(flags.api_keys, flags.api_key_file));
  AppGate gate(NIBBLE_VERSION);
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<HttpServer> server,
                          HttpServer::start(flags.http, gate.callbacks()));
  NIBBLE_ASSIGN_OR_RETURN(ServingSession session, signals.interruptible([&flags] {
    name_thread("loader");
    return load(flags);
  }));
  NIBBLE_ASSIGN_OR_RETURN(AppOptions options, app_options(flags, session));
  const TextFrontend text(session.tokenizer, session.chat_template, session.no_template);
  AppContext context(std::move(options), *session.engine, text);
  NIBBLE_LOG(kInfo, "{}: {}, {}, context {}, loaded in {:.0f} ms", session.model_name,
             session.scheme, session.backend_name, session.engine->options().max_model_len,
             session.load_ms);
  gate.open(context);
  serve_until_signal(flags, signals, *server, context);
  server.reset();  // before what its requests use
  return {};
}

}  // namespace

void add_serve_command(CLI::App& app, CommandContext& context) {
  const auto flags = std::make_shared<ServeFlags>();
  CLI::App* command =
      app.add_subcommand("serve", "Serve a model to OpenAI clients until SIGTERM or Ctrl-C");
  add_serve_flags(*command, *flags);
  command->callback([flags, &context] { context.action = [flags] { return run(*flags); }; });
}

}  // namespace nibble
