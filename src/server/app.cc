#include "server/app.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "server/error.h"
#include "server/http_text.h"
#include "server/routes.h"

namespace nibble {
namespace {

struct RouteEntry {
  std::string_view method;
  std::string_view path;  // one that ends with a slash is the beginning of longer ones
  Route route;
};

constexpr std::array kRoutes = {
    RouteEntry{"POST", "/v1/chat/completions", route_chat},
    RouteEntry{"POST", "/v1/completions", route_completions},
    RouteEntry{"POST", "/v1/responses", route_responses},
    RouteEntry{"GET", "/v1/responses/", route_response},
    RouteEntry{"DELETE", "/v1/responses/", route_delete_response},
    RouteEntry{"POST", "/v1/responses/", route_cancel_response},
    RouteEntry{"POST", "/v1/messages", route_messages},
    RouteEntry{"POST", "/v1/messages/count_tokens", route_count_tokens},
    RouteEntry{"POST", "/v1/embeddings", route_embeddings},
    RouteEntry{"POST", "/generate", route_generate},
    RouteEntry{"GET", "/v1/models", route_models},
    RouteEntry{"GET", "/v1/models/", route_model},
    RouteEntry{"GET", "/health", route_health},
    RouteEntry{"GET", "/ready", route_health},
    RouteEntry{"GET", "/ping", route_health},
    RouteEntry{"GET", "/health_generate", route_health_generate},
    RouteEntry{"GET", "/version", route_version},
    RouteEntry{"GET", "/load", route_load},
    RouteEntry{"GET", "/get_load", route_load},
    RouteEntry{"GET", "/server_info", route_server_info},
    RouteEntry{"GET", "/get_server_info", route_server_info},
    RouteEntry{"GET", "/model_info", route_model_info},
    RouteEntry{"GET", "/get_model_info", route_model_info},
    RouteEntry{"GET", "/flush_cache", route_flush_cache},
    RouteEntry{"POST", "/flush_cache", route_flush_cache},
    RouteEntry{"POST", "/reset_prefix_cache", route_flush_cache},
    RouteEntry{"POST", "/abort_request", route_abort},
    RouteEntry{"POST", "/start_profile", route_profile},
    RouteEntry{"POST", "/stop_profile", route_profile},
    RouteEntry{"GET", "/metrics", route_metrics},
    RouteEntry{"POST", "/tokenize", route_tokenize},
    RouteEntry{"POST", "/v1/tokenize", route_tokenize},
    RouteEntry{"POST", "/detokenize", route_detokenize},
    RouteEntry{"POST", "/v1/detokenize", route_detokenize},
};

bool matches(const RouteEntry& entry, std::string_view path) {
  return entry.path.ends_with('/') ? path.starts_with(entry.path) && path.size() > entry.path.size()
                                   : path == entry.path;
}

std::string_view plain_method(const HttpRequest& request) {
  return request.method == "HEAD" ? "GET" : std::string_view(request.method);
}

std::vector<std::string_view> methods_of(std::string_view path) {
  std::vector<std::string_view> methods;
  for (const RouteEntry& entry : kRoutes) {
    if (matches(entry, path)) {
      methods.push_back(entry.method);
    }
  }
  return methods;
}

/// What monitors ask for without a key.
bool is_open(std::string_view path) {
  constexpr std::array kOpen = {"/health", "/ready", "/ping", "/version", "/metrics"};
  return std::find(kOpen.begin(), kOpen.end(), path) != kOpen.end();
}

bool authorized(const AppContext& context, const HttpRequest& request) {
  return context.options.api_keys.empty() || is_open(request.path) ||
         key_place(context.options.api_keys, request).has_value();
}

HttpResponse unsupported_coding(std::string_view coding, ErrorShape shape) {
  HttpResponse response = error_response(
      {415,
       fmt::format("Content-Encoding \"{}\" is not supported: send the body uncompressed, without "
                   "this header",
                   shown(coding)),
       "", ""},
      shape);
  response.headers.emplace_back("Accept-Encoding", "identity");
  return response;
}

}  // namespace

std::optional<ApiError> check_model(const AppContext& context, const std::string& model) {
  const auto& names = context.options.model_names;
  if (model.empty() || std::find(names.begin(), names.end(), model) != names.end()) {
    return std::nullopt;
  }
  return ApiError{404,
                  fmt::format("The model `{}` does not exist; this server serves `{}`",
                              shown(model), names.front()),
                  "model", "model_not_found"};
}

std::optional<HttpResponse> check_head(const AppContext& context, const HttpRequest& request) {
  const ErrorShape shape = error_shape(request.path);
  if (!authorized(context, request)) {
    return error_response({401,
                           "Incorrect API key: send one of the server's (--api-key) in the header "
                           "\"Authorization: Bearer KEY\" or \"x-api-key: KEY\"",
                           "", "invalid_api_key"},
                          shape);
  }
  const std::string_view method = plain_method(request);
  const std::vector<std::string_view> allowed = methods_of(request.path);
  if (allowed.empty()) {
    return error_response(
        {404, fmt::format("no route {} {}", shown(method), shown(request.path)), "", ""}, shape);
  }
  if (std::find(allowed.begin(), allowed.end(), method) == allowed.end()) {
    const std::string names = fmt::format("{}", fmt::join(allowed, ", "));
    HttpResponse response = error_response(
        {405, fmt::format("{} takes {}, not {}", shown(request.path), names, shown(method)), "",
         ""},
        shape);
    response.headers.emplace_back("Allow", names);
    return response;
  }
  if (method == "POST" && !context.ready) {
    return error_response({503, "the server is shutting down", "", ""}, shape);
  }
  if (const std::string_view coding = content_coding(request.headers);
      method == "POST" && !coding.empty()) {
    return unsupported_coding(coding, shape);
  }
  return std::nullopt;
}

void handle_request(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const HttpRequest& request = exchange->request();
  if (auto refusal = check_head(context, request)) {
    exchange->respond(*std::move(refusal));
    return;
  }
  const auto entry = std::find_if(kRoutes.begin(), kRoutes.end(), [&](const RouteEntry& route) {
    return route.method == plain_method(request) && matches(route, request.path);
  });
  entry->route(context, exchange);
}

}  // namespace nibble
