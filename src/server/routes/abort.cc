#include "server/error.h"
#include "server/field_reader.h"
#include "server/routes.h"

namespace nibble {

/// {"rid": id} or {"abort_all": true}: ends answers under way, which say so.
void route_abort(AppContext& context, const std::shared_ptr<HttpExchange>& exchange) {
  const auto object = parse_object(exchange->request().body);
  if (const auto* error = std::get_if<ApiError>(&object)) {
    refuse(*exchange, *error);
    return;
  }
  const Json& body = std::get<Json>(object);
  FieldReader fields(body);
  std::string id;
  bool all = false;
  fields.text("rid", id);
  fields.boolean("abort_all", all);
  if (id.empty() && !all) {
    fields.fail("rid", "rid: expected the id of a request, or abort_all: true");
  }
  if (fields.error()) {
    refuse(*exchange, *fields.error());
    return;
  }
  const size_t count = all ? context.running->end_all() : context.running->end(id);
  exchange->respond(
      {.body = Json::object({{"success", true}, {"aborted", static_cast<int64_t>(count)}}).dump()});
}

}  // namespace nibble
