#include "server/error.h"
#include "server/routes.h"

namespace nibble {
namespace {

Json model_json(const AppContext& context, const std::string& name) {
  return Json::object({{"id", name},
                       {"object", "model"},
                       {"created", context.options.created},
                       {"owned_by", "nibble"},
                       {"root", context.options.model_names.front()},
                       {"parent", Json()},
                       {"max_model_len", context.engine.options().max_model_len}});
}

}  // namespace

void route_models(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  JsonArray models;
  for (const std::string& name : context.options.model_names) {
    models.push_back(model_json(context, name));
  }
  const Json list = Json::object({{"object", "list"}, {"data", std::move(models)}});
  exchange->respond({.body = list.dump()});
}

void route_model(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const std::string name = exchange->request().path.substr(std::string("/v1/models/").size());
  if (const auto error = check_model(context, name)) {
    exchange->respond(error_response(*error));
    return;
  }
  exchange->respond({.body = model_json(context, name).dump()});
}

}  // namespace nibble
