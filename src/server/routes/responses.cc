#include <ctime>
#include <utility>

#include <fmt/format.h>

#include "server/chat_body.h"
#include "server/error.h"
#include "server/field_reader.h"
#include "server/generation.h"
#include "server/response_format.h"
#include "server/routes.h"

namespace nibble {
namespace {

constexpr std::string_view kPrefix = "/v1/responses/";
constexpr std::string_view kCancel = "/cancel";

ApiError not_found(std::string_view id) {
  return {
      404,
      fmt::format("Response with id \"{}\" not found: it was not stored, or is too old", shown(id)),
      "", ""};
}

/// The items that this request continues.
std::variant<JsonArray, ApiError> earlier_items(const AppContext& context, const std::string& id) {
  constexpr const char* kParam = "previous_response_id";
  if (id.empty()) {
    return JsonArray();
  }
  const auto stored = context.responses->find(id);
  if (!stored) {
    return ApiError{400,
                    fmt::format("Previous response with id \"{}\" not found: it was not stored, or "
                                "is too old; send all items as input",
                                shown(id)),
                    kParam, "previous_response_not_found"};
  }
  if (stored->items.empty()) {
    return ApiError{400, "previous_response_id: this response is being made", kParam, ""};
  }
  return Json::parse(stored->items).value().as_array();
}

/// Members of a response that repeat what was asked.
Json repeated(const AppContext& context, const Json& body, const GenerationRequest& request) {
  Json out = Json::object(
      {{"created_at", int64_t{std::time(nullptr)}},
       {"completed_at", Json()},
       {"model", request.model.empty() ? context.options.model_names.front() : request.model},
       {"background", false},
       {"parallel_tool_calls", request.parallel_tool_calls},
       {"temperature", request.sampling.temperature},
       {"top_p", request.sampling.top_p},
       {"truncation", "disabled"}});
  const std::pair<const char*, Json> defaults[] = {
      {"instructions", Json()},
      {"max_output_tokens", Json()},
      {"max_tool_calls", Json()},
      {"metadata", JsonObject()},
      {"previous_response_id", Json()},
      {"prompt_cache_key", Json()},
      {"reasoning", Json::object({{"effort", Json()}, {"summary", Json()}})},
      {"safety_identifier", Json()},
      {"service_tier", "default"},
      {"store", true},
      {"text", Json::object({{"format", Json::object({{"type", "text"}})}})},
      {"tool_choice", "auto"},
      {"tools", JsonArray()},
      {"user", Json()}};
  for (const auto& [name, fallback] : defaults) {
    const Json* asked = body.find(name);
    out.set(name, asked != nullptr && !asked->is_null() ? *asked : fallback);
  }
  return out;
}

struct ResponseJob {
  GenerationRequest request;
  ResponsePlan plan;
};

std::variant<ResponseJob, ApiError> parse_responses(const AppContext& context,
                                                    const HttpRequest& request) {
  const auto object = parse_object(request.body);
  if (const auto* error = std::get_if<ApiError>(&object)) {
    return *error;
  }
  const Json& body = std::get<Json>(object);
  FieldReader fields(body);
  bool store = true;
  std::string previous;
  fields.boolean("store", store);
  fields.text("previous_response_id", previous);
  if (fields.error()) {
    return *fields.error();
  }
  auto earlier = earlier_items(context, previous);
  if (const auto* error = std::get_if<ApiError>(&earlier)) {
    return *error;
  }
  JsonArray items = std::move(std::get<JsonArray>(earlier));
  const ChatBody chat = chat_of_responses(body, items, context.options.schema.strictness);
  if (const auto* error = std::get_if<ApiError>(&chat)) {
    return *error;
  }
  const auto& [body_of_chat, ignored] = std::get<TranslatedBody>(chat);
  ParsedRequest parsed = read_chat_request(body_of_chat, context.options.schema);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    return renamed(*error, {{"response_format", "text.format"},
                            {"reasoning_effort", "reasoning.effort"},
                            {"messages", "input"}});
  }
  ResponseJob job{.request = std::move(std::get<GenerationRequest>(parsed))};
  job.request.ignored = ignored;
  for (Json& item : response_items(body)) {
    items.push_back(std::move(item));
  }
  job.plan = {.id = "resp_" + random_id(),
              .members = repeated(context, body, job.request),
              .items = std::move(items),
              .store = store ? context.responses : nullptr};
  return job;
}

std::string id_of(const HttpRequest& request) { return request.path.substr(kPrefix.size()); }

}  // namespace

void route_responses(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  auto parsed = parse_responses(context, exchange->request());
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    refuse(*exchange, *error);
    return;
  }
  auto& [request, plan] = std::get<ResponseJob>(parsed);
  GenerationJob job{.request = std::move(request), .id = plan.id};
  if (const auto error = prepare_chat(context, job)) {
    refuse(*exchange, renamed(*error, {{"messages", "input"}}));
    return;
  }
  job.format = std::make_unique<ResponseFormat>(std::move(plan));
  job.names = {{"response_format.json_schema.schema", "text.format"},
               {"max_tokens", "max_output_tokens"},
               {"messages", "input"}};
  run_generation(context, exchange, std::move(job));
}

void route_response(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const std::string id = id_of(exchange->request());
  const auto stored = context.responses->find(id);
  if (!stored) {
    refuse(*exchange, not_found(id));
  } else if (exchange->request().query.find("stream=true") != std::string::npos) {
    refuse(*exchange,
           {400, "stream: events are not stored; ask for the response alone", "stream", ""});
  } else {
    exchange->respond({.body = stored->response});
  }
}

void route_delete_response(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const std::string id = id_of(exchange->request());
  if (!context.responses->erase(id)) {
    refuse(*exchange, not_found(id));
    return;
  }
  exchange->respond(
      {.body = Json::object({{"id", id}, {"object", "response"}, {"deleted", true}}).dump()});
}

void route_cancel_response(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  std::string id = id_of(exchange->request());
  if (!id.ends_with(kCancel)) {
    refuse(*exchange,
           {404, fmt::format("no route POST {}", shown(exchange->request().path)), "", ""});
    return;
  }
  id.resize(id.size() - kCancel.size());
  const auto stored = context.responses->find(id);
  if (!stored) {
    refuse(*exchange, not_found(id));
  } else if (!stored->items.empty() || context.running->end(id) == 0) {
    refuse(*exchange, {400, "Cannot cancel a completed response", "", ""});
  } else {
    Json response = Json::parse(stored->response).value();
    response.set("status", "cancelled");
    exchange->respond({.body = response.dump()});
  }
}

}  // namespace nibble
