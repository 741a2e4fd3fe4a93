#include "server/http_message.h"

#include <string>
#include <utility>

#include "server/http_text.h"

namespace nibble {

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
