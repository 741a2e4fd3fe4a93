#include "server/error.h"
#include "server/routes.h"

namespace nibble {

void route_profile(AppContext& /*context*/, const std::shared_ptr<HttpExchange>& exchange) {
  refuse(*exchange, {400,
                     "there is no profiler in this server: read /metrics, or run a profiler of the "
                     "system (perf, nsys) beside it",
                     "", ""});
}

}  // namespace nibble
