#pragma once

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/http.h"

namespace nibble {

/// A request of the network library in our own terms.
[[nodiscard]] HttpRequest to_http_request(
    boost::beast::http::request<boost::beast::http::string_body> message);

}  // namespace nibble
