#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "server/app.h"

namespace nibble {

/// Stands before the routes while the model is loaded: the port is taken and /health answers before
/// there is anything to serve.
class AppGate final {
 public:
  explicit AppGate(std::string version) : version_(std::move(version)) {}

  /// Answers 503 until open() was called, then what the routes say. Thread-safe.
  void handle(const std::shared_ptr<HttpExchange>& exchange) const;
  /// Like nibble::check_head; 503 until open() was called. Thread-safe.
  [[nodiscard]] std::optional<HttpResponse> check_head(const HttpRequest& request) const;
  /// The callbacks of an HTTP server that stands behind this gate, which must outlive it.
  [[nodiscard]] HttpCallbacks callbacks() const;
  /// Lets requests through to `context`, which must outlive the HTTP server.
  void open(AppContext& context) { context_ = &context; }

 private:
  std::string version_;
  std::atomic<AppContext*> context_{nullptr};
};

/// Generates one token and waits for it: shows that the model, its kernels and the engine work.
/// Errors: what the engine says.
[[nodiscard]] Status prove_engine(Engine& engine);

}  // namespace nibble
