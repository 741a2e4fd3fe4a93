#include <algorithm>

#include <fmt/format.h>

#include "text/grammar/schema_writer.h"

namespace nibble {
namespace {

struct Items {
  std::vector<std::string> first;  // rules of prefixItems
  std::string rest;                // rule of further items; empty: none may follow
};

Result<Items> read_items(const SchemaPlace& place, SchemaWriter& writer) {
  Items out;
  if (const Json* prefix = place.find("prefixItems")) {
    if (!prefix->is_array()) {
      return schema_error(place.pointer + "/prefixItems", "expected an array");
    }
    for (size_t i = 0; i < prefix->as_array().size(); ++i) {
      out.first.push_back(writer.rule_of(place.item("prefixItems", i)));
    }
  }
  const char* keyword = place.find("items") == nullptr ? "unevaluatedItems" : "items";
  const Json* items = place.find(keyword);
  if (items != nullptr && items->is_array()) {
    return schema_error(place.pointer + "/items",
                        "a list of schemas is of older drafts; call it prefixItems");
  }
  if (place.find("additionalItems") != nullptr) {
    return schema_error(place.pointer + "/additionalItems",
                        "this keyword is of older drafts; use items");
  }
  if (items == nullptr) {
    out.rest = out.first.empty() ? "json_value" : "";
  } else if (!items->is_bool() || items->as_bool()) {
    out.rest = writer.rule_of(place.member(keyword));
  }
  return out;
}

}  // namespace

Result<std::string> array_body(const SchemaPlace& place, SchemaWriter& writer) {
  NIBBLE_ASSIGN_OR_RETURN(Items items, read_items(place, writer));
  NIBBLE_ASSIGN_OR_RETURN(const auto min_items, schema_count(place, "minItems"));
  NIBBLE_ASSIGN_OR_RETURN(const auto max_items, schema_count(place, "maxItems"));
  const auto named = static_cast<int64_t>(items.first.size());
  int64_t least = min_items.value_or(0);
  if (max_items && *max_items < least) {
    return schema_error(place.pointer + "/minItems", "above maxItems: no array is allowed");
  }
  if (items.rest.empty() && place.find("items") == nullptr && least > named) {
    items.rest = "json_value";  // nothing forbids more, and more are wanted
  }
  if (items.rest.empty() && least > named) {
    return schema_error(place.pointer + "/minItems",
                        "above the number of prefixItems, and further items are forbidden");
  }
  if (max_items && *max_items < named) {
    items.first.resize(static_cast<size_t>(*max_items));
    items.rest.clear();
  }
  // All of prefixItems come, then the rest.
  std::string body;
  for (const std::string& name : items.first) {
    body += (body.empty() ? "" : " json_comma ") + name;
  }
  const auto before = static_cast<int64_t>(items.first.size());
  least = std::max<int64_t>(0, least - before);
  const auto most = max_items ? std::optional(*max_items - before) : std::nullopt;
  if (items.rest.empty() || (most && *most == 0)) {
    return fmt::format(R"("[" json_blank {} json_blank "]")", body);
  }
  if (before > 0) {
    body += fmt::format(" (json_comma {}){{{},{}}}", items.rest, least,
                        most ? std::to_string(*most) : "");
    return fmt::format(R"("[" json_blank {} json_blank "]")", body);
  }
  const std::string some =
      fmt::format("{} (json_comma {}){{{},{}}}", items.rest, items.rest,
                  std::max<int64_t>(0, least - 1), most ? std::to_string(*most - 1) : "");
  return least > 0 ? fmt::format(R"("[" json_blank {} json_blank "]")", some)
                   : fmt::format(R"("[" json_blank ({} json_blank)? "]")", some);
}

}  // namespace nibble
