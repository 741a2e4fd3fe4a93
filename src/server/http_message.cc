#include "server/http_message.h"

#include <string>
#include <utility>

#include <boost/beast/core/string.hpp>

#include "server/http_text.h"

namespace nibble {

std::string unknown_transfer_coding(const boost::beast::http::fields& fields) {
  std::string all;
  const auto [first, last] = fields.equal_range(boost::beast::http::field::transfer_encoding);
  for (auto field = first; field != last; ++field) {
    all += (all.empty() ? "" : ", ") + std::string(field->value());
  }
  return boost::beast::iequals(all, "chunked") ? "" : all;
}

HttpRequest to_http_request(boost::beast::http::request<boost::beast::http::string_body> message) {
  HttpRequest request;
  request.method = std::string(message.method_string());
  HttpTarget target = parse_target(std::string_view(message.target()));
  request.path = std::move(target.path);
  request.query = std::move(target.query);
  for (const auto& field : message) {
    request.headers.emplace_back(std::string(field.name_string()), std::string(field.value()));
  }
  request.body = std::move(message.body());
  request.id = usable_request_id(request.header("X-Request-Id"));
  return request;
}

}  // namespace nibble
