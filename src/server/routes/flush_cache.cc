#include "server/routes.h"

namespace nibble {

/// Requests that come after the answer find no prefix of those before.
void route_flush_cache(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  context.engine.forget_prefixes();
  exchange->respond({.body = R"({"success":true,"message":"Cache flushed."})"});
}

}  // namespace nibble
