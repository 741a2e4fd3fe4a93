#include "engine/session.h"

#include <chrono>
#include <filesystem>
#include <future>
#include <utility>

#include "arch/kv_specs.h"
#include "arch/model_text.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "base/thread_name.h"
#include "engine/draft_loader.h"
#include "engine/memory_plan.h"
#include "gguf/split.h"
#include "kvcache/kv_cache_shape.h"
#include "quant/kv_formats.h"

namespace nibble {
namespace {

constexpr const char* kDefaultTemplate = "default";

// The template in a `chat_template` field; empty when it holds none.
Result<std::string> template_of_field(const Json& field, const std::string& file) {
  if (field.is_null()) {
    return std::string();
  }
  if (field.is_string()) {
    return field.as_string();
  }
  if (!field.is_array()) {
    return make_error(StatusCode::kCorrupt,
                      "{}: field chat_template: expected a string or a list of named templates",
                      file);
  }
  std::string first;
  for (const Json& item : field.as_array()) {
    const JsonReader reader(item, file + ": field chat_template");
    NIBBLE_ASSIGN_OR_RETURN(const std::string name, reader.required_string("name"));
    NIBBLE_ASSIGN_OR_RETURN(std::string source, reader.required_string("template"));
    if (name == kDefaultTemplate) {
      return source;
    }
    if (first.empty()) {
      first = std::move(source);
    }
  }
  return first;
}

// A template of a model folder that does not parse is a damaged file, not a wrong request.
Result<ChatTemplate> parse_template(std::string_view source, const std::string& where) {
  auto parsed = ChatTemplate::parse(source, where);
  if (!parsed.ok() && parsed.status().code() == StatusCode::kInvalidArgument) {
    return Status(StatusCode::kCorrupt, parsed.status().message());
  }
  return parsed;
}

std::string name_of(const std::string& model_dir) {
  std::error_code ignored;
  const auto path = std::filesystem::weakly_canonical(model_dir, ignored);
  return ignored ? model_dir : path.filename().string();
}

}  // namespace

std::vector<std::string> kv_cache_dtypes() {
  std::vector<std::string> names = {"auto"};
  for (const KvCode code : kKvCodes) {
    names.emplace_back(kv_code_name(code));
  }
  return names;
}

Result<std::optional<KvCode>> parse_kv_cache_dtype(const std::string& name) {
  if (name == "auto") {
    return std::optional<KvCode>();
  }
  for (const KvCode code : kKvCodes) {
    if (name == kv_code_name(code)) {
      return std::optional(code);
    }
  }
  return make_error(StatusCode::kInvalidArgument,
                    "kv-cache-dtype is '{}', but must be auto or one of {}", name, kv_code_names());
}

KvCode kv_code_for(std::optional<KvCode> asked, const ModelConfig& config, const Backend& backend) {
  if (asked) {
    return *asked;
  }
  if (config.dtype == DType::kBF16) {
    return KvCode::kBf16;
  }
  const KvView f32 =
      view_of(kv_specs(config, KvCode::kF32).front(), backend.preferred_page_size(KvCode::kF32));
  if (backend.check_kv(f32, config.num_heads).ok()) {
    return KvCode::kF32;
  }
  NIBBLE_LOG(kInfo, "keys and values are cached in bf16: {} has no f32 cache, which {} asks for",
             backend.name(), dtype_name(config.dtype));
  return KvCode::kBf16;
}

SamplingParams default_sampling(const ModelConfig& config, const SamplingParams& fallback) {
  SamplingParams out = fallback;
  if (config.default_temperature >= 0) {
    out.temperature = config.default_temperature;
  }
  if (config.default_top_p >= 0) {
    out.top_p = config.default_top_p;
  }
  if (config.default_top_k >= 0) {
    out.top_k = config.default_top_k;
  }
  if (config.default_repetition_penalty >= 0) {
    out.repetition_penalty = config.default_repetition_penalty;
  }
  return out;
}

Result<ChatTemplate> gguf_chat_template(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(const gguf::FileSet model, gguf::FileSet::open(path));
  constexpr std::string_view kKey = "tokenizer.chat_template";
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view source,
                          model.metadata().optional_string(kKey, ""));
  if (source.empty()) {
    return make_error(StatusCode::kNotFound,
                      "{} has no chat template ({}); send plain prompts instead", name_of(path),
                      kKey);
  }
  return parse_template(std::string(source), fmt::format("{}: {}", name_of(path), kKey));
}

Result<ChatTemplate> load_chat_template(const std::string& model_dir) {
  if (gguf::is_gguf_path(model_dir)) {
    return gguf_chat_template(model_dir);
  }
  const std::string jinja = model_dir + "/chat_template.jinja";
  if (file_exists(jinja)) {
    NIBBLE_ASSIGN_OR_RETURN(std::string source, read_file(jinja));
    return parse_template(source, "chat_template.jinja");
  }
  for (const char* file : {"chat_template.json", "tokenizer_config.json"}) {
    const std::string path = model_dir + "/" + file;
    if (!file_exists(path)) {
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
    auto json = Json::parse(text);
    if (!json.ok()) {
      return json.status().with_context(file);
    }
    if (const Json* field = json->find("chat_template")) {
      NIBBLE_ASSIGN_OR_RETURN(std::string source, template_of_field(*field, file));
      if (!source.empty()) {
        return parse_template(source, std::string(file) + ": chat_template");
      }
    }
  }
  return make_error(StatusCode::kNotFound,
                    "{} has no chat template (chat_template.jinja, or the field chat_template of "
                    "tokenizer_config.json); send plain prompts instead",
                    name_of(model_dir));
}

namespace {

// Tokenizer and chat template of a folder.
Status load_text(const std::string& text_dir, ServingSession& session) {
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> tokenizer, Tokenizer::load(text_dir));
  session.tokenizer = std::move(tokenizer);
  auto chat_template = load_chat_template(text_dir);
  if (chat_template.ok()) {
    session.chat_template = std::move(chat_template).value();
  } else {
    session.no_template = chat_template.status();
  }
  return {};
}

// Backend, model and the engine that runs it.
Status load_engine(const std::string& model_dir,
                   const SessionOptions& options,
                   ServingSession& session) {
  NIBBLE_ASSIGN_OR_RETURN(session.backend, open_backend(options.backend));
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(model_dir));
  EngineOptions wanted = options.engine;
  wanted.kv_code = kv_code_for(options.kv_code, config, *session.backend);
  NIBBLE_ASSIGN_OR_RETURN(const EngineOptions resolved,
                          resolve_in_memory(wanted, model_dir, config, *session.backend));
  NIBBLE_ASSIGN_OR_RETURN(auto model,
                          load_model(model_dir, *session.backend, model_options(resolved)));
  session.config = model->config();
  session.scheme = model->scheme();
  session.backend_name = session.backend->name();
  NIBBLE_ASSIGN_OR_RETURN(auto draft, load_draft_model(resolved, session.config, *session.backend));
  NIBBLE_ASSIGN_OR_RETURN(session.engine,
                          Engine::start(std::move(model), resolved, std::move(draft)));
  return {};
}

}  // namespace

Result<ServingSession> open_session(const std::string& model_dir, const SessionOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  NIBBLE_RETURN_IF_ERROR(check_is_model(model_dir));
  ServingSession session;
  session.model_name = name_of(model_dir);
  const std::string& text_dir = options.tokenizer_dir.empty() ? model_dir : options.tokenizer_dir;
  // Large tokenizers take as long as the weights: both are read at once.
  auto text = std::async(std::launch::async, [&] {
    name_thread("tokenizer");
    return load_text(text_dir, session);
  });
  const Status loaded = load_engine(model_dir, options, session);
  NIBBLE_RETURN_IF_ERROR(text.get());
  NIBBLE_RETURN_IF_ERROR(loaded);
  if (const std::string& draft = options.engine.speculation.draft_model; !draft.empty()) {
    NIBBLE_RETURN_IF_ERROR(check_same_tokens(*session.tokenizer, draft));
  }
  release_free_memory();  // parsing a large tokenizer leaves tens of megabytes
  session.load_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return session;
}

}  // namespace nibble
