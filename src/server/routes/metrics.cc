#include "server/routes.h"

namespace nibble {

void route_metrics(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  exchange->respond(
      {.content_type = "text/plain; version=0.0.4; charset=utf-8",
       .body = context.metrics.render(context.engine.stats(), context.engine.options(),
                                      context.options.model_names.front())});
}

}  // namespace nibble
