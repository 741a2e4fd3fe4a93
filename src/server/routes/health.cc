#include <utility>

#include "server/error.h"
#include "server/routes.h"

namespace nibble {

void route_health(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const EngineStats stats = context.engine.stats();
  if (!context.ready) {
    exchange->respond(error_response({503, "the server is not ready or is shutting down", "", ""}));
  } else if (!stats.healthy) {
    exchange->respond(error_response(
        {503, "the engine has failed; restart the server: " + stats.failure, "", ""}));
  } else {
    exchange->respond({.body = R"({"status":"ok"})"});
  }
}

/// 200 when a token was generated for it.
void route_health_generate(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  Request request;
  request.id = exchange->request().id;
  request.prompt = {0};
  request.max_tokens = 1;
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  exchange->on_disconnect([cancelled = request.cancelled] { cancelled->store(true); });
  request.on_event = [exchange](TokenEvent event) {
    exchange->post([exchange, event = std::move(event)] {
      if (event.finish == FinishReason::kError || event.finish == FinishReason::kCancelled) {
        refuse(*exchange, {503, "no token was generated: " + event.failure.message(), "", ""});
      } else if (event.finish != FinishReason::kNone) {
        exchange->respond({.body = R"({"status":"ok"})"});
      }
    });
  };
  const Status status = context.engine.submit(std::move(request));
  if (!status.ok()) {
    refuse(*exchange, {503, status.message(), "", ""});
  }
}

void route_version(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  exchange->respond(version_response(context.options.version));
}

HttpResponse version_response(const std::string& version) {
  return {.body = Json::object({{"version", version}}).dump()};
}

}  // namespace nibble
