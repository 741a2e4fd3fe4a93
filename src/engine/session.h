#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/open_backend.h"
#include "engine/engine.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace nibble {

struct SessionOptions {
  BackendOptions backend;
  EngineOptions engine;           // its kv_code is overwritten with that of kv_code_for()
  std::optional<KvCode> kv_code;  // absent: what the checkpoint's type asks for
  std::string tokenizer_dir;      // of tokenizer and chat template; "": the model's folder
};

/// A model ready to answer: everything that `generate`, `chat` and `serve` share.
struct ServingSession {
  std::string model_name;  // last part of the model's path
  ModelConfig config;
  std::string scheme;        // of the linear layers
  std::string backend_name;  // "cpu/avx512"
  double load_ms = 0;
  std::unique_ptr<Backend> backend;  // outlives the engine
  std::shared_ptr<const Tokenizer> tokenizer;
  std::optional<ChatTemplate> chat_template;  // absent: the model has none, see no_template
  Status no_template;                         // why chat_template is absent
  std::unique_ptr<Engine> engine;
};

/// Loads a Hugging Face model folder and starts its engine. Errors name the file at fault. A
/// missing or bad chat template is no error here: no_template keeps it for those who need one.
/// (A tokenizer may know more tokens than the model: Engine::submit refuses prompts with these.)
Result<ServingSession> open_session(const std::string& model_dir, const SessionOptions& options);

/// What --kv-cache-dtype takes: auto, and the names of all formats of caches.
[[nodiscard]] std::vector<std::string> kv_cache_dtypes();

/// The format of this name; of auto, none. kInvalidArgument lists the names.
Result<std::optional<KvCode>> parse_kv_cache_dtype(const std::string& name);

/// The cache's format: what was asked for, else one that holds what the checkpoint's type holds:
/// bf16 for BF16, f32 for F16 and F32. A backend without an f32 cache takes bf16 and logs it.
KvCode kv_code_for(std::optional<KvCode> asked, const ModelConfig& config, const Backend& backend);

/// The model's own sampling defaults (generation_config.json); `fallback` where it has none.
SamplingParams default_sampling(const ModelConfig& config, const SamplingParams& fallback);

/// Reads the chat template of a model folder: chat_template.jinja, else chat_template.json, else
/// `chat_template` of tokenizer_config.json (a string, or a list of {name, template} of which
/// "default" is taken). kNotFound when there is none.
Result<ChatTemplate> load_chat_template(const std::string& model_dir);

}  // namespace nibble
