#pragma once

#include <string>
#include <vector>

#include "net/http_client.h"

namespace nibble {

/// GET of a route; a status other than 200 is that of http_error().
Result<HttpAnswer> fetch_ok(HttpClient& client,
                            const std::string& route,
                            const std::vector<HttpHeader>& headers);

/// The id of the first model that /v1/models lists. kCorrupt when it lists none.
Result<std::string> first_served_model(HttpClient& client, const std::vector<HttpHeader>& headers);

}  // namespace nibble
