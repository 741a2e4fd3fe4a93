#pragma once

#include <cstdint>
#include <memory>

#include "server/http_connection.h"

namespace nibble {

/// The handler's view of request number `serial` of a connection.
[[nodiscard]] std::shared_ptr<HttpExchange> make_exchange(
    std::shared_ptr<HttpConnection> connection, uint64_t serial, HttpRequest request);

}  // namespace nibble
