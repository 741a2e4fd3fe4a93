#pragma once

#include <string>

#include <boost/beast/http/fields.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/http.h"

namespace nibble {

/// The transfer codings of a request if they are others than "chunked", by which alone the end of a
/// body can be found; "" otherwise.
[[nodiscard]] std::string unknown_transfer_coding(const boost::beast::http::fields& fields);

/// A request of the network library in our own terms.
[[nodiscard]] HttpRequest to_http_request(
    boost::beast::http::request<boost::beast::http::string_body> message);

}  // namespace nibble
