#include "text/grammar/schema_writer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "text/grammar/ebnf.h"
#include "text/grammar/schema_types.h"

namespace nibble {
namespace {

constexpr int64_t kMostRules = 4096;
constexpr size_t kMostBytes = size_t{1} << 20;

constexpr std::array kAnnotations = {"title",       "description", "default",  "examples",
                                     "$comment",    "$schema",     "$id",      "$defs",
                                     "definitions", "deprecated",  "readOnly", "writeOnly"};
// What no grammar enforces, whatever else the schema says.
constexpr std::array kUnenforced = {"not",
                                    "if",
                                    "then",
                                    "else",
                                    "dependentRequired",
                                    "dependentSchemas",
                                    "dependencies",
                                    "contains",
                                    "minContains",
                                    "maxContains",
                                    "$dynamicRef",
                                    "$recursiveRef"};
// Beside these only annotations may stand; they are read in this order.
constexpr std::array kAlone = {"$ref", "anyOf", "oneOf", "allOf"};

/// Keywords of a schema, in its own order, that are in none of the lists of what says nothing.
bool says_nothing(std::string_view key) {
  return std::ranges::find(kAnnotations, key) != kAnnotations.end();
}

bool is_keyword(const Json& schema, std::string_view key) {
  if (key == "type" || key == "const" || key == "enum" ||
      std::ranges::find(kAlone, key) != kAlone.end()) {
    return true;
  }
  const Json one = Json::object({{std::string(key), *schema.find(key)}});
  return implied_type(one) != SchemaTypes{0};
}

Status only_annotations_beside(const SchemaPlace& place, std::string_view keyword) {
  for (const auto& [key, value] : place.schema->as_object()) {
    if (key != keyword && !says_nothing(key) && is_keyword(*place.schema, key)) {
      return schema_error(
          place.pointer + "/" + key,
          fmt::format("a keyword beside {} is not enforced; state it within", keyword));
    }
  }
  return {};
}

Status check_keywords(const SchemaPlace& place) {
  for (const char* key : kUnenforced) {
    if (place.find(key) != nullptr) {
      return schema_error(place.pointer + "/" + key, "this keyword is not enforced");
    }
  }
  const Json* unique = place.find("uniqueItems");
  if (unique != nullptr && !(unique->is_bool() && !unique->as_bool())) {
    return schema_error(place.pointer + "/uniqueItems", "this keyword is not enforced");
  }
  return {};
}

/// "a~b/c" of "a~0b~1c", with %XX read as well.
std::string unescaped(std::string_view part) {
  std::string out;
  for (size_t i = 0; i < part.size(); ++i) {
    const std::string_view rest = part.substr(i);
    if (rest.starts_with("~0") || rest.starts_with("~1")) {
      out += rest[1] == '0' ? '~' : '/';
      ++i;
      continue;
    }
    const auto hex = [](char c) {
      return std::string_view("0123456789abcdef").find(static_cast<char>(c | 0x20));
    };
    if (rest[0] == '%' && rest.size() > 2 && hex(rest[1]) < 16 && hex(rest[2]) < 16) {
      out += static_cast<char>(hex(rest[1]) * 16 + hex(rest[2]));
      i += 2;
      continue;
    }
    out += rest[0];
  }
  return out;
}

/// A number that reads back as the schema's own.
bool is_exact(const Json& value) {
  constexpr double kExact = 0x1p53;
  return !value.is_double() || std::abs(value.as_double()) < kExact;
}

}  // namespace

std::string SchemaWriter::add_rule(std::string_view hint, std::string_view body) {
  std::string name = fmt::format("{}{}{}", prefix_, hint, next_++);
  rules_ += fmt::format("{} ::= {}\n", name, body);
  return name;
}

Result<std::string> SchemaWriter::costly_rule(const std::string& pointer,
                                              std::string body,
                                              int64_t cost) {
  const auto found = costly_.find(body);
  if (found != costly_.end()) {
    return found->second;
  }
  NIBBLE_RETURN_IF_ERROR(budget_.take_cost(pointer, cost));
  std::string name = add_rule("c", body);
  costly_.emplace(std::move(body), name);
  return name;
}

Result<std::string> SchemaWriter::limited_rule(const std::string& pointer,
                                               const std::string& body,
                                               int64_t most,
                                               int64_t cost) {
  const auto [known, fresh] = costly_.try_emplace(fmt::format("{} {}", most, body));
  if (fresh) {
    NIBBLE_RETURN_IF_ERROR(budget_.take_cost(pointer, cost));
    known->second = fmt::format("{}l{}", prefix_, next_++);
    rules_ += ebnf_limited(known->second, body, most);
    shortest_limit_ = shortest_limit_ == 0 ? most : std::min(shortest_limit_, most);
  }
  return known->second;
}

std::string SchemaWriter::rule_of(const SchemaPlace& place) {
  const auto [found, fresh] = names_.emplace(place.schema, "");
  if (fresh) {
    found->second = fmt::format("{}s{}", prefix_, next_++);
    pointers_[found->second] = place.pointer;
    waiting_.emplace_back(place, found->second);
  }
  return found->second;
}

Result<std::string> SchemaWriter::write() {
  const std::string first = rule_of({&root_, "#"});
  while (!waiting_.empty()) {
    const auto [place, name] = std::move(waiting_.front());
    waiting_.pop_front();
    current_ = name;
    NIBBLE_ASSIGN_OR_RETURN(const std::string body, body_of(place));
    rules_ += fmt::format("{} ::= {}\n", name, body);
    if (next_ > kMostRules || rules_.size() > kMostBytes) {
      return schema_error("#", fmt::format("the schema is too large: its grammar has more than {} "
                                           "rules or {} bytes",
                                           kMostRules, kMostBytes));
    }
  }
  NIBBLE_RETURN_IF_ERROR(check_aliases());
  return first;
}

Result<std::string> SchemaWriter::body_of(const SchemaPlace& place) {
  if (place.schema->is_bool()) {
    if (!place.schema->as_bool()) {
      return schema_error(place.pointer, "the schema false allows no value");
    }
    return std::string("json_value");
  }
  if (!place.schema->is_object()) {
    return schema_error(place.pointer, fmt::format("expected a schema, an object or a boolean, got "
                                                   "{}",
                                                   json_type_name(*place.schema)));
  }
  NIBBLE_RETURN_IF_ERROR(check_keywords(place));
  for (const char* keyword : kAlone) {
    if (place.find(keyword) != nullptr) {
      NIBBLE_RETURN_IF_ERROR(only_annotations_beside(place, keyword));
      return std::string_view(keyword) == "$ref" ? reference(place) : choice(place, keyword);
    }
  }
  if (place.find("const") != nullptr || place.find("enum") != nullptr) {
    return values(place);
  }
  return typed(place);
}

Result<SchemaPlace> SchemaWriter::resolve(const SchemaPlace& place) {
  const std::string pointer = place.pointer + "/$ref";
  const Json* ref = place.find("$ref");
  if (!ref->is_string() || !ref->as_string().starts_with('#')) {
    return schema_error(pointer, "only references within the schema (\"#/...\") can be followed");
  }
  NIBBLE_RETURN_IF_ERROR(budget_.take_steps(pointer, 1 + std::ssize(ref->as_string()) / 16));
  SchemaPlace target{&root_, shown_pointer("", ref->as_string())};
  std::string_view rest = std::string_view(ref->as_string()).substr(1);
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('/', 1), rest.size());
    const std::string part = unescaped(rest.substr(1, end - 1));
    const Json* next = rest[0] == '/' ? target.schema->find(part) : nullptr;
    if (target.schema->is_array() && !part.empty() && part.size() < 6 &&
        part.find_first_not_of("0123456789") == std::string::npos) {
      const auto index = static_cast<size_t>(std::stoul(part));
      const JsonArray& items = target.schema->as_array();
      next = index < items.size() ? &items[index] : nullptr;
    }
    if (next == nullptr) {
      return schema_error(pointer, "there is nothing at the place it names");
    }
    target.schema = next;
    rest = rest.substr(end);
  }
  return target;
}

Result<std::string> SchemaWriter::reference(const SchemaPlace& place) {
  NIBBLE_ASSIGN_OR_RETURN(const SchemaPlace target, resolve(place));
  std::string name = rule_of(target);
  aliases_.emplace_back(current_, name);
  return name;
}

Result<SchemaPlace> SchemaWriter::target_of(SchemaPlace place) {
  for (int64_t hops = 0; place.find("$ref") != nullptr; ++hops) {
    if (hops > kMostRules) {
      return schema_error(place.pointer, "the reference leads back to itself");
    }
    NIBBLE_ASSIGN_OR_RETURN(place, resolve(place));
  }
  return place;
}

Status SchemaWriter::check_disjoint(const SchemaPlace& place, const JsonArray& options) {
  constexpr size_t kMostOptions = 64;
  if (options.size() > kMostOptions) {
    return schema_error(place.pointer + "/oneOf",
                        fmt::format("more than {} schemas", kMostOptions));
  }
  std::vector<const Json*> targets;
  for (size_t i = 0; i < options.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const SchemaPlace target, target_of(place.item("oneOf", i)));
    targets.push_back(target.schema);
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      NIBBLE_RETURN_IF_ERROR(
          budget_.take_steps(place.pointer + "/oneOf", comparing_steps(*targets[i], *targets[j])));
      if (!are_disjoint(*targets[i], *targets[j])) {
        return schema_error(
            place.pointer + "/oneOf",
            fmt::format("a value may be valid against both {} and {}, which is not enforced; give "
                        "them different types or a required member with different constants, or "
                        "use anyOf",
                        j, i));
      }
    }
  }
  return {};
}

Result<std::string> SchemaWriter::choice(const SchemaPlace& place, std::string_view keyword) {
  const Json& options = *place.find(keyword);
  if (!options.is_array() || options.as_array().empty()) {
    return schema_error(fmt::format("{}/{}", place.pointer, keyword),
                        "expected an array of schemas, not empty");
  }
  if (keyword == "allOf" && options.as_array().size() > 1) {
    return schema_error(place.pointer + "/allOf",
                        "several schemas at once are not enforced; merge them into one");
  }
  if (keyword == "oneOf") {
    NIBBLE_RETURN_IF_ERROR(check_disjoint(place, options.as_array()));
  }
  std::string body;
  for (size_t i = 0; i < options.as_array().size(); ++i) {
    const std::string name = rule_of(place.item(keyword, i));
    aliases_.emplace_back(current_, name);
    body += (body.empty() ? "" : " | ") + name;
  }
  return body;
}

Result<std::string> SchemaWriter::values(const SchemaPlace& place) {
  const bool constant = place.find("const") != nullptr;
  const char* keyword = constant ? "const" : "enum";
  for (const auto& [key, value] : place.schema->as_object()) {
    if (key != keyword && key != "type" && !says_nothing(key) && is_keyword(*place.schema, key)) {
      return schema_error(
          place.pointer + "/" + key,
          fmt::format("a keyword beside {} is not enforced; leave it out", keyword));
    }
  }
  const auto types = types_of(*place.schema);
  if (!types) {
    return schema_error(place.pointer + "/type", "expected the name of a type, or a list of them");
  }
  const Json& listed = *place.find(keyword);
  if (!constant && !listed.is_array()) {
    return schema_error(place.pointer + "/enum", "expected an array");
  }
  const JsonArray single = constant ? JsonArray{listed} : JsonArray();
  std::string body;
  for (const Json& value : constant ? single : listed.as_array()) {
    if (!is_exact(value)) {
      return schema_error(fmt::format("{}/{}", place.pointer, keyword),
                          "numbers of 2^53 and more must be written as integers below 2^64");
    }
    if ((type_of(value) & *types) != 0) {
      body += (body.empty() ? "" : " | ") + ebnf_literal(value.dump());
    }
  }
  const std::string pointer = fmt::format("{}/{}", place.pointer, keyword);
  if (body.empty()) {
    return schema_error(pointer, "no value is allowed");
  }
  NIBBLE_RETURN_IF_ERROR(budget_.take_cost(pointer, std::ssize(body)));  // some share their states
  return body;
}

Result<std::string> SchemaWriter::typed(const SchemaPlace& place) {
  auto types = types_of(*place.schema);
  if (!types) {
    return schema_error(place.pointer + "/type", "expected the name of a type, or a list of them");
  }
  if (place.find("type") == nullptr) {
    const auto implied = implied_type(*place.schema);
    if (!implied) {
      return schema_error(place.pointer,
                          "without \"type\", keywords of several types are not enforced; state it");
    }
    types = *implied == 0 ? kEveryType : *implied;
  }
  if (*types == kEveryType && implied_type(*place.schema) == SchemaTypes{0}) {
    return std::string("json_value");
  }
  std::string body;
  for (const char* type : {"object", "array", "string", "number", "integer", "boolean", "null"}) {
    const SchemaTypes one = schema_type(type);
    const bool in_number = one == kIntegerType && (*types & kNumberType) == kNumberType;
    if ((*types & one) != one || in_number) {
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const std::string part, one_type(place, type));
    body += (body.empty() ? "" : " | ") + part;
  }
  return body;
}

Result<std::string> SchemaWriter::one_type(const SchemaPlace& place, std::string_view type) {
  switch (schema_type(type)) {
    case kObjectType:
      return object_body(place, *this);
    case kArrayType:
      return array_body(place, *this);
    case kStringType:
      return string_body(place, *this);
    case kNumberType:
      return number_body(place);
    case kIntegerType:
      return integer_body(place);
    case kBooleanType:
      return std::string("\"true\" | \"false\"");
    default:
      return std::string("\"null\"");
  }
}

// Takes rules away that are aliases of none that is left, until none is or all that are left go in
// circles.
Status SchemaWriter::check_aliases() const {
  std::unordered_map<std::string, int64_t> open;                    // aliases of each rule
  std::unordered_map<std::string, std::vector<std::string>> users;  // that are aliases of it
  for (const auto& [from, to] : aliases_) {
    ++open[from];
    users[to].push_back(from);
  }
  std::vector<std::string> done;
  for (const auto& [name, pointer] : pointers_) {
    if (!open.contains(name)) {
      done.push_back(name);
    }
  }
  while (!done.empty()) {
    const std::string name = std::move(done.back());
    done.pop_back();
    for (const std::string& user : users[name]) {
      if (--open[user] == 0) {
        done.push_back(user);
      }
    }
  }
  std::string first;
  for (const auto& [name, count] : open) {
    const std::string& pointer = pointers_.at(name);
    first = count > 0 && (first.empty() || pointer < first) ? pointer : first;
  }
  return first.empty() ? Status()
                       : schema_error(first, "the schema refers to itself without a value between");
}

}  // namespace nibble
