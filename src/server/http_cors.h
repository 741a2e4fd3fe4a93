#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/http.h"

namespace nibble {

/// Headers that let a browser give an answer to the page that asked for it: none where CORS is off,
/// the request comes from no page or its origin is not allowed.
[[nodiscard]] HttpHeaders cors_headers(const CorsOptions& options, const HttpRequest& request);

/// The answer to a browser that asks whether a page may send a request; nothing for all other
/// requests, and where CORS is off.
[[nodiscard]] std::optional<HttpResponse> cors_preflight(const CorsOptions& options,
                                                         const HttpRequest& request);

}  // namespace nibble
