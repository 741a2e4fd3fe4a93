#include "text/grammar/schema_types.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

namespace nibble {
namespace {

using NamedType = std::pair<std::string_view, SchemaTypes>;

constexpr std::array kTypes = {NamedType{"null", kNullType},     NamedType{"boolean", kBooleanType},
                               NamedType{"object", kObjectType}, NamedType{"array", kArrayType},
                               NamedType{"string", kStringType}, NamedType{"integer", kIntegerType},
                               NamedType{"number", kNumberType}};
// Keywords that say something about values of one type.
constexpr std::array kKeywords = {NamedType{"properties", kObjectType},
                                  NamedType{"required", kObjectType},
                                  NamedType{"additionalProperties", kObjectType},
                                  NamedType{"patternProperties", kObjectType},
                                  NamedType{"propertyNames", kObjectType},
                                  NamedType{"minProperties", kObjectType},
                                  NamedType{"maxProperties", kObjectType},
                                  NamedType{"unevaluatedProperties", kObjectType},
                                  NamedType{"dependentRequired", kObjectType},
                                  NamedType{"dependentSchemas", kObjectType},
                                  NamedType{"dependencies", kObjectType},
                                  NamedType{"items", kArrayType},
                                  NamedType{"prefixItems", kArrayType},
                                  NamedType{"additionalItems", kArrayType},
                                  NamedType{"unevaluatedItems", kArrayType},
                                  NamedType{"contains", kArrayType},
                                  NamedType{"minContains", kArrayType},
                                  NamedType{"maxContains", kArrayType},
                                  NamedType{"minItems", kArrayType},
                                  NamedType{"maxItems", kArrayType},
                                  NamedType{"uniqueItems", kArrayType},
                                  NamedType{"pattern", kStringType},
                                  NamedType{"format", kStringType},
                                  NamedType{"minLength", kStringType},
                                  NamedType{"maxLength", kStringType},
                                  NamedType{"minimum", kNumberType},
                                  NamedType{"maximum", kNumberType},
                                  NamedType{"exclusiveMinimum", kNumberType},
                                  NamedType{"exclusiveMaximum", kNumberType},
                                  NamedType{"multipleOf", kNumberType}};

/// The values that a schema allows, where it lists them.
std::optional<std::vector<const Json*>> listed_values(const Json& schema) {
  std::vector<const Json*> out;
  if (const Json* value = schema.find("const")) {
    out.push_back(value);
    return out;
  }
  const Json* values = schema.find("enum");
  if (values == nullptr || !values->is_array()) {
    return std::nullopt;
  }
  for (const Json& value : values->as_array()) {
    out.push_back(&value);
  }
  return out;
}

/// Equal as JSON schemas mean it, or possibly so.
bool may_be_equal(const Json& a, const Json& b) {
  if (a.is_number() && b.is_number()) {
    return a.as_double() == b.as_double();
  }
  const bool scalar = !a.is_array() && !a.is_object() && !b.is_array() && !b.is_object();
  return scalar ? a.dump() == b.dump() : a.type() == b.type();
}

bool values_disjoint(const std::vector<const Json*>& a, const std::vector<const Json*>& b) {
  return std::ranges::none_of(a, [&](const Json* x) {
    return std::ranges::any_of(b, [&](const Json* y) { return may_be_equal(*x, *y); });
  });
}

SchemaTypes allowed_types(const Json& schema) {
  if (!schema.is_object()) {
    return kEveryType;
  }
  if (const auto values = listed_values(schema)) {
    SchemaTypes out = 0;
    for (const Json* value : *values) {
      out |= type_of(*value);
    }
    return out;
  }
  return types_of(schema).value_or(kEveryType);
}

/// By their types and values alone.
bool plainly_disjoint(const Json& a, const Json& b) {
  if ((allowed_types(a) & allowed_types(b)) == 0) {
    return true;
  }
  const auto first = listed_values(a);
  const auto second = listed_values(b);
  return first && second && values_disjoint(*first, *second);
}

int64_t steps_of_listed(const Json& a, const Json& b) {
  constexpr int64_t kPiece = 32;  // bytes
  const auto first = listed_values(a);
  const auto second = listed_values(b);
  if (!first || !second) {
    return 1;
  }
  const auto pieces = [](const std::vector<const Json*>& values) {
    int64_t all = 0;
    for (const Json* value : values) {
      all += 1 + (value->is_string() ? std::ssize(value->as_string()) / kPiece : 0);
    }
    return all;
  };
  return 1 + pieces(*first) * std::ssize(*second) + pieces(*second) * std::ssize(*first);
}

int64_t required_count(const Json& schema) {
  const Json* required = schema.find("required");
  return required != nullptr && required->is_array() ? std::ssize(required->as_array()) : 0;
}

bool requires_member(const Json& schema, std::string_view name) {
  const Json* required = schema.find("required");
  return required != nullptr && required->is_array() &&
         std::ranges::any_of(required->as_array(), [&](const Json& each) {
           return each.is_string() && each.as_string() == name;
         });
}

}  // namespace

SchemaTypes schema_type(std::string_view name) {
  const auto found = std::ranges::find(kTypes, name, &NamedType::first);
  return found == kTypes.end() ? 0 : found->second;
}

SchemaTypes type_of(const Json& value) {
  switch (value.type()) {
    case Json::Type::kNull:
      return kNullType;
    case Json::Type::kBool:
      return kBooleanType;
    case Json::Type::kInt:
    case Json::Type::kUint:
      return kIntegerType;
    case Json::Type::kDouble:
      return std::trunc(value.as_double()) == value.as_double() ? kIntegerType : kFractionType;
    case Json::Type::kString:
      return kStringType;
    case Json::Type::kArray:
      return kArrayType;
    case Json::Type::kObject:
      return kObjectType;
  }
  return 0;
}

std::optional<SchemaTypes> types_of(const Json& schema) {
  const Json* type = schema.find("type");
  if (type == nullptr) {
    return kEveryType;
  }
  if (type->is_string()) {
    const SchemaTypes one = schema_type(type->as_string());
    return one == 0 ? std::nullopt : std::optional(one);
  }
  if (!type->is_array() || type->as_array().empty()) {
    return std::nullopt;
  }
  SchemaTypes out = 0;
  for (const Json& name : type->as_array()) {
    const SchemaTypes one = name.is_string() ? schema_type(name.as_string()) : 0;
    if (one == 0) {
      return std::nullopt;
    }
    out |= one;
  }
  return out;
}

std::optional<SchemaTypes> implied_type(const Json& schema) {
  SchemaTypes out = 0;
  for (const auto& [keyword, type] : kKeywords) {
    if (schema.find(keyword) == nullptr) {
      continue;
    }
    if (out != 0 && out != type) {
      return std::nullopt;
    }
    out = type;
  }
  return out;
}

bool are_disjoint(const Json& a, const Json& b) {
  if (plainly_disjoint(a, b)) {
    return true;
  }
  const Json* first = a.find("properties");
  const Json* second = b.find("properties");
  if (first == nullptr || second == nullptr || !first->is_object() || !second->is_object() ||
      allowed_types(a) != kObjectType || allowed_types(b) != kObjectType) {
    return false;
  }
  return std::ranges::any_of(first->as_object(), [&](const auto& member) {
    const Json* other = second->find(member.first);
    return other != nullptr && requires_member(a, member.first) &&
           requires_member(b, member.first) && plainly_disjoint(member.second, *other);
  });
}

int64_t comparing_steps(const Json& a, const Json& b) {
  int64_t steps = steps_of_listed(a, b);
  const Json* first = a.find("properties");
  const Json* second = b.find("properties");
  if (first == nullptr || second == nullptr || !first->is_object() || !second->is_object()) {
    return steps;
  }
  const int64_t required = required_count(a) + required_count(b);
  for (const auto& [name, schema] : first->as_object()) {
    const Json* other = second->find(name);
    steps += 1 + (other == nullptr ? 0 : required + steps_of_listed(schema, *other));
  }
  return steps;
}

}  // namespace nibble
