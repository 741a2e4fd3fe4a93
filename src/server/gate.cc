#include "server/gate.h"

#include <future>
#include <utility>

#include "server/error.h"
#include "server/routes.h"

namespace nibble {

std::optional<HttpResponse> AppGate::check_head(const HttpRequest& request) const {
  if (const AppContext* context = context_) {
    return nibble::check_head(*context, request);
  }
  if (request.path == "/version") {
    return version_response(version_);
  }
  HttpResponse response =
      error_response({503, "the model is being loaded", "", ""}, error_shape(request.path));
  response.headers.emplace_back("Retry-After", "1");
  return response;
}

void AppGate::handle(const std::shared_ptr<HttpExchange>& exchange) const {
  if (auto answer = check_head(exchange->request())) {
    exchange->respond(*std::move(answer));
  } else {
    handle_request(*context_, exchange);
  }
}

HttpCallbacks AppGate::callbacks() const {
  return {.handle = [this](const auto& exchange) { handle(exchange); },
          .check_head = [this](const HttpRequest& head) { return check_head(head); },
          .error_body =
              [](const HttpError& error) {
                return error_response({error.status, std::string(error.message), "", ""},
                                      error_shape(error.path));
              }};
}

Status prove_engine(Engine& engine) {
  auto last = std::make_shared<std::promise<TokenEvent>>();
  std::future<TokenEvent> answer = last->get_future();
  Request request;
  request.id = "start-up";
  request.prompt = {0};
  request.max_tokens = 1;
  request.sampling.temperature = 0;
  request.on_event = [last](TokenEvent event) {
    if (event.finish != FinishReason::kNone) {
      last->set_value(std::move(event));
    }
  };
  NIBBLE_RETURN_IF_ERROR(engine.submit(std::move(request)));
  const TokenEvent event = answer.get();
  if (event.finish == FinishReason::kCancelled) {
    return make_error(StatusCode::kUnavailable, "the model does not generate: it was cancelled");
  }
  return event.failure.with_context("the model does not generate");
}

}  // namespace nibble
