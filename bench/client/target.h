#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "bench/client/load_run.h"
#include "bench/client/prompts.h"

namespace nibble {

/// Which server is asked, and how.
struct TargetOptions {
  std::string base_url;
  AnswerApi api = AnswerApi::kCompletions;
  std::string endpoint;  // "": the API's usual route
  std::string model;     // "": the first that /v1/models lists
  std::string api_key;
  std::vector<HttpHeader> headers;
  LoadTiming timing = LoadTiming::kVllm;
  HttpClientOptions http;
  double ready_s = 600;  // how long to wait until the server answers
};

/// What requests say beside prompt and length.
struct BodyOptions {
  std::optional<double> temperature;
  bool ignore_eos = false;
  std::vector<std::string> stop;
  Json extra;  // an object, whose fields win; or null
};

/// A server that was found to be there.
class Target final {
 public:
  /// Asks for the model's name. Waits up to ready_s for a server that does not answer. kUnavailable
  /// when it still does not; the server's own answer otherwise: kInvalidArgument for a wrong key.
  static Result<Target> open(const TargetOptions& options);

  /// The body of the request for this prompt.
  [[nodiscard]] std::string body(const Prompt& prompt, const BodyOptions& options) const;
  /// Sends a request and waits for its answer; tries again for up to ready_s while the server
  /// cannot be reached or answers 503.
  Status try_out(const std::string& body);
  /// The number that SGLang's server_info has for speculative decoding, if there is one.
  std::optional<double> accept_length();

  [[nodiscard]] HttpClient& client() { return *client_; }
  [[nodiscard]] const LoadTarget& load() const { return load_; }
  [[nodiscard]] const std::string& model() const { return options_.model; }
  [[nodiscard]] const std::string& url() const { return url_; }

 private:
  Target(TargetOptions options, std::string url, std::unique_ptr<HttpClient> client);

  Status find_model();
  template <typename Try>
  Status until_ready(const Try& attempt);

  TargetOptions options_;
  std::string url_;
  std::unique_ptr<HttpClient> client_;
  LoadTarget load_;
};

}  // namespace nibble
