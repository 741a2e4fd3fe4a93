#pragma once

#include <memory>

#include "server/app.h"

namespace nibble {

// One function per route; each answers its exchange, now or later.
using Route = void (*)(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);

/// The answer of /version.
[[nodiscard]] HttpResponse version_response(const std::string& version);

void route_chat(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_completions(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_responses(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
// /v1/responses/{id}, and /v1/responses/{id}/cancel.
void route_response(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_delete_response(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_cancel_response(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_messages(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_count_tokens(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_embeddings(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_models(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_model(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);  // /{id}
void route_generate(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_abort(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_flush_cache(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_load(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_server_info(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_model_info(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_profile(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_health_generate(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_health(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_version(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_metrics(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_tokenize(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);
void route_detokenize(AppContext& context, const std::shared_ptr<HttpExchange>& exchange);

}  // namespace nibble
