#include "net/served_model.h"

#include "net/answer_reader.h"

namespace nibble {

Result<HttpAnswer> fetch_ok(HttpClient& client,
                            const std::string& route,
                            const std::vector<HttpHeader>& headers) {
  HttpCall call;
  call.target = route;
  call.headers = headers;
  NIBBLE_ASSIGN_OR_RETURN(HttpAnswer answer, fetch(client, std::move(call)));
  if (answer.head.status != 200) {
    return http_error(answer.head, answer.body);
  }
  return answer;
}

Result<std::string> first_served_model(HttpClient& client, const std::vector<HttpHeader>& headers) {
  NIBBLE_ASSIGN_OR_RETURN(const HttpAnswer answer, fetch_ok(client, "/v1/models", headers));
  const auto json = Json::parse(answer.body);
  const Json* data = json.ok() ? json->find("data") : nullptr;
  const bool listed = data != nullptr && data->is_array() && !data->as_array().empty();
  const Json* id = listed ? data->as_array().front().find("id") : nullptr;
  if (id == nullptr || !id->is_string()) {
    return make_error(StatusCode::kCorrupt, "/v1/models lists no model; name one with --model");
  }
  return id->as_string();
}

}  // namespace nibble
