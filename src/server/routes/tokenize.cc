#include <fmt/format.h>

#include "server/error.h"
#include "server/field_reader.h"
#include "server/prompt.h"
#include "server/routes.h"

namespace nibble {
namespace {

/// The body as an object; answers the exchange and returns null if it is none.
Json read_object(const std::shared_ptr<HttpExchange>& exchange) {
  Result<Json> body = Json::parse(exchange->request().body);
  if (!body.ok() || !body->is_object()) {
    exchange->respond(error_response({400,
                                      "the request body is not a JSON object" +
                                          (body.ok() ? "" : ": " + body.status().message()),
                                      "", ""}));
    return {};
  }
  return std::move(*body);
}

}  // namespace

/// {"prompt": text} or {"messages": [...]}: the ids that a completion or chat would start from.
void route_tokenize(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const Json body = read_object(exchange);
  if (body.is_null()) {
    return;
  }
  FieldReader fields(body);
  std::string model, prompt;
  bool add_special = true;
  fields.text("model", model);
  fields.text("prompt", prompt);
  fields.boolean("add_special_tokens", add_special);
  PromptTokens tokens;
  if (fields.find("messages") != nullptr) {
    const ParsedRequest parsed = parse_chat_request(body.dump(), context.options.schema);
    if (const auto* error = std::get_if<ApiError>(&parsed)) {
      exchange->respond(error_response(*error));
      return;
    }
    tokens = chat_prompt(context, std::get<GenerationRequest>(parsed));
  } else if (fields.find("prompt") == nullptr) {
    fields.fail("prompt", "prompt: expected a string (or messages: an array)");
  } else {
    tokens = text_prompt(context, prompt, {.add_special = add_special});
  }
  auto error = fields.error() ? fields.error() : check_model(context, model);
  if (!error && std::holds_alternative<ApiError>(tokens)) {
    error = std::get<ApiError>(tokens);
  }
  if (error) {
    exchange->respond(error_response(*error));
    return;
  }
  const auto& ids = std::get<std::vector<int32_t>>(tokens);
  JsonArray list(ids.begin(), ids.end());
  const Json answer = Json::object({{"count", static_cast<int64_t>(ids.size())},
                                    {"max_model_len", context.engine.options().max_model_len},
                                    {"tokens", std::move(list)}});
  exchange->respond({.body = answer.dump()});
}

void route_detokenize(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const Json body = read_object(exchange);
  if (body.is_null()) {
    return;
  }
  FieldReader fields(body);
  std::string model;
  std::vector<int32_t> ids;
  fields.text("model", model);
  fields.token_ids("tokens", ids);
  if (fields.find("tokens") == nullptr) {
    fields.fail("tokens", "tokens: expected an array of token ids");
  }
  const int32_t vocabulary = context.text.tokenizer().vocab_size();
  for (const int32_t id : ids) {
    if (id >= vocabulary) {
      fields.fail("tokens",
                  fmt::format("tokens: {} is not below the vocabulary's size {}", id, vocabulary));
    }
  }
  if (const auto error = fields.error() ? fields.error() : check_model(context, model)) {
    exchange->respond(error_response(*error));
    return;
  }
  exchange->respond({.body = Json::object({{"prompt", context.text.decode(ids)}}).dump()});
}

}  // namespace nibble
