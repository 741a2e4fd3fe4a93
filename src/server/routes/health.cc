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

void route_version(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  exchange->respond(version_response(context.options.version));
}

HttpResponse version_response(const std::string& version) {
  return {.body = Json::object({{"version", version}}).dump()};
}

}  // namespace nibble
