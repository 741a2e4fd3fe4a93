#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/json.h"
#include "base/status.h"
#include "engine/session.h"
#include "server/api_keys.h"
#include "server/http.h"

namespace nibble {

/// Everything that `nibble serve` is told.
struct ServeFlags {
  std::string model_dir;
  std::vector<std::string> names;
  std::vector<std::string> api_keys;
  std::string api_key_file;
  std::vector<ApiKey> keys;  // of both
  HttpOptions http;
  SessionOptions session;
  std::string kv_cache_dtype = "auto";
  std::string prefer = "ttft";
  std::string chat_template;
  std::string template_arguments;
  std::string speculative_config;
  std::string tool_parser = "auto";
  std::string reasoning_parser = "auto";
  std::string pooling = "auto";
  std::string generation_config = "auto";
  double shutdown_timeout_s = 30;
  double request_timeout_s = 0;
  int64_t stream_interval = 1;
  bool strict = false;
  std::vector<std::string> refusals;  // flags of other servers that mean nothing here, with reasons
};

/// Adds MODEL and every flag; `flags` must outlive `command`.
void add_serve_flags(CLI::App& command, ServeFlags& flags);

/// kUnsupported for the first flag of another server that this one cannot honour, with the reason.
Status check_refusals(const ServeFlags& flags);

/// --default-chat-template-kwargs as an object, null when not given.
Result<Json> template_arguments_of(const ServeFlags& flags);

}  // namespace nibble
