#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>

#include "text/grammar/ebnf.h"
#include "text/grammar/grammar_cost.h"
#include "text/grammar/regex_check.h"
#include "text/grammar/schema_writer.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

// Members that a schema need not name: what their names match, and the rule of their values.
struct FreeMembers {
  std::string key;
  std::string value;
};

struct Member {
  std::string rule;  // name and value
  bool required = false;
};

struct ObjectParts {
  std::vector<Member> members;
  std::optional<FreeMembers> free;  // after those
};

/// Code points of names that are free members' no more.
struct NameTree {
  std::map<uint32_t, size_t> next;
  bool ends = false;
};

std::vector<NameTree> name_tree(const std::set<std::string>& names) {
  std::vector<NameTree> nodes(1);
  for (const std::string& name : names) {
    size_t node = 0;
    for (size_t at = 0; at < name.size();) {
      const size_t length = utf8_step(name, at).length;  // names come from JSON: valid UTF-8
      const uint32_t code = utf8_decode(std::string_view(name).substr(at, length));
      at += length;
      const auto [found, fresh] = nodes[node].next.try_emplace(code, nodes.size());
      node = found->second;
      if (fresh) {
        nodes.emplace_back();
      }
    }
    nodes[node].ends = true;
  }
  return nodes;
}

/// A name in quotes, without escapes, that is none of `names`.
Result<std::string> other_name(const SchemaPlace& place,
                               const std::set<std::string>& names,
                               SchemaWriter& writer) {
  constexpr std::string_view kNever = R"(\"\\\x00-\x1f)";
  const std::vector<NameTree> nodes = name_tree(names);
  NIBBLE_RETURN_IF_ERROR(
      writer.budget().take_cost(place.pointer, std::ssize(nodes) * kNameNodeCost));
  std::vector<std::string> rules(nodes.size());
  for (size_t i = nodes.size(); i-- > 0;) {  // a node's children have larger numbers
    std::string excluded(kNever);
    std::string body = nodes[i].ends ? "" : R"("\"")";
    for (const auto& [code, child] : nodes[i].next) {
      excluded += ebnf_class_character(code);
      std::string one = fmt::format("[{}] {}", ebnf_class_character(code), rules[child]);
      body += (body.empty() ? "" : " | ") + one;
    }
    body += fmt::format("{}[^{}] json_rest", body.empty() ? "" : " | ", excluded);
    rules[i] = writer.add_rule("n", body);
  }
  return R"("\"" )" + rules.front();
}

Result<std::set<std::string>> required_names(const SchemaPlace& place) {
  std::set<std::string> out;
  const Json* required = place.find("required");
  if (required == nullptr) {
    return out;
  }
  const bool names =
      required->is_array() &&
      std::ranges::all_of(required->as_array(), [](const Json& name) { return name.is_string(); });
  if (!names) {
    return schema_error(place.pointer + "/required", "expected an array of strings");
  }
  for (const Json& name : required->as_array()) {
    out.insert(name.as_string());
  }
  return out;
}

/// The keyword that says what members may have that properties does not name; "" for none.
std::string_view rest_keyword(const SchemaPlace& place) {
  for (const char* key : {"additionalProperties", "unevaluatedProperties"}) {
    if (place.find(key) != nullptr) {
      return key;
    }
  }
  return "";
}

/// The name that a pattern allows, where propertyNames or patternProperties has one.
Result<std::string> key_of_pattern(std::string_view pattern,
                                   const std::string& pointer,
                                   SchemaWriter& writer) {
  auto whole = check_regex(pattern, RegexPlace::kJsonString);
  if (!whole.ok()) {
    return whole.status().with_context(pointer);
  }
  return writer.costly_rule(pointer, fmt::format(R"("\"" {} "\"")", whole->ebnf), whole->cost);
}

Result<std::optional<FreeMembers>> pattern_members(const SchemaPlace& place, SchemaWriter& writer) {
  const Json& patterns = *place.find("patternProperties");
  const std::string pointer = place.pointer + "/patternProperties";
  if (!patterns.is_object()) {
    return schema_error(pointer, "expected an object");
  }
  const std::string_view rest = rest_keyword(place);
  const bool closed = rest.empty() || (place.find(rest)->is_bool() && !place.find(rest)->as_bool());
  if (patterns.as_object().size() != 1 || place.find("properties") != nullptr || !closed ||
      place.find("propertyNames") != nullptr) {
    return schema_error(pointer,
                        "only one pattern is enforced, without properties, propertyNames or "
                        "additionalProperties beside it");
  }
  const std::string& pattern = patterns.as_object().begin()->first;
  FreeMembers out;
  NIBBLE_ASSIGN_OR_RETURN(out.key, key_of_pattern(pattern, pointer, writer));
  out.value = writer.rule_of(place.entry("patternProperties", pattern));
  return std::optional(std::move(out));
}

/// The pattern of propertyNames; "" where it says nothing.
Result<std::string> name_pattern(const SchemaPlace& place) {
  const Json* names = place.find("propertyNames");
  if (names == nullptr || (names->is_bool() && names->as_bool())) {
    return std::string();
  }
  const SchemaPlace inner = place.member("propertyNames");
  std::string out;
  for (const char* key : {"pattern", "type"}) {
    const Json* value = names->find(key);
    if (value != nullptr && !value->is_string()) {
      return schema_error(inner.pointer + "/" + key, "expected a string");
    }
  }
  const Json* type = names->find("type");
  const Json* pattern = names->find("pattern");
  const size_t known = (type != nullptr ? 1U : 0U) + (pattern != nullptr ? 1U : 0U);
  if (!names->is_object() || names->as_object().size() != known ||
      (type != nullptr && type->as_string() != "string")) {
    return schema_error(inner.pointer, "only a pattern for names is enforced");
  }
  return pattern == nullptr ? std::string() : pattern->as_string();
}

Result<std::optional<FreeMembers>> free_members(const SchemaPlace& place,
                                                const std::set<std::string>& names,
                                                SchemaWriter& writer) {
  if (place.find("patternProperties") != nullptr) {
    return pattern_members(place, writer);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string pattern, name_pattern(place));
  const std::string_view keyword = rest_keyword(place);
  const Json* rest = keyword.empty() ? nullptr : place.find(keyword);
  const bool open = rest == nullptr ? names.empty() : !rest->is_bool() || rest->as_bool();
  if (!pattern.empty() && !names.empty()) {
    return schema_error(place.pointer + "/propertyNames",
                        "a pattern for names beside properties is not enforced");
  }
  if (!open) {
    return std::optional<FreeMembers>();
  }
  FreeMembers out;
  out.value = rest == nullptr ? "json_value" : writer.rule_of(place.member(keyword));
  if (pattern.empty()) {
    out.key = "json_string";
    if (!names.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(out.key, other_name(place, names, writer));
    }
  } else {
    NIBBLE_ASSIGN_OR_RETURN(out.key,
                            key_of_pattern(pattern, place.pointer + "/propertyNames", writer));
  }
  return std::optional(std::move(out));
}

Result<ObjectParts> read_object(const SchemaPlace& place, SchemaWriter& writer) {
  ObjectParts out;
  NIBBLE_ASSIGN_OR_RETURN(std::set<std::string> required, required_names(place));
  std::set<std::string> names;
  const auto add = [&](const std::string& name, const std::string& value) {
    names.insert(name);
    const std::string rule = writer.add_rule(
        "m", fmt::format("{} json_colon {}", ebnf_literal(Json(name).dump()), value));
    out.members.push_back({.rule = rule, .required = required.erase(name) > 0});
  };
  if (const Json* properties = place.find("properties")) {
    if (!properties->is_object()) {
      return schema_error(place.pointer + "/properties", "expected an object");
    }
    for (const auto& [name, schema] : properties->as_object()) {
      add(name, writer.rule_of(place.entry("properties", name)));
    }
  }
  const std::string_view keyword = rest_keyword(place);
  const Json* rest = keyword.empty() ? nullptr : place.find(keyword);
  const bool closed = (rest != nullptr && rest->is_bool() && !rest->as_bool()) ||
                      place.find("patternProperties") != nullptr ||
                      place.find("propertyNames") != nullptr;
  if (!required.empty() && closed) {
    return schema_error(place.pointer + "/required",
                        "it names a member that properties does not have");
  }
  for (const std::string& name : std::set<std::string>(required)) {  // that properties lacks
    add(name, rest == nullptr ? "json_value" : writer.rule_of(place.member(keyword)));
  }
  NIBBLE_ASSIGN_OR_RETURN(out.free, free_members(place, names, writer));
  return out;
}

/// Numbers of members that are not certain already: only those of objects with free members alone.
Result<std::string> repetitions(const SchemaPlace& place, const ObjectParts& parts) {
  NIBBLE_ASSIGN_OR_RETURN(const auto least, schema_count(place, "minProperties"));
  NIBBLE_ASSIGN_OR_RETURN(const auto most, schema_count(place, "maxProperties"));
  const auto required = std::ranges::count_if(parts.members, &Member::required);
  const bool only_free = parts.members.empty() && parts.free.has_value();
  if (least && *least > required && !(only_free && *least == 1)) {
    return schema_error(place.pointer + "/minProperties",
                        "it is enforced as far as required members make it up, and as 1 without "
                        "properties");
  }
  if (most && *most < std::ssize(parts.members)) {
    return schema_error(place.pointer + "/maxProperties",
                        "fewer members than properties has are not enforced");
  }
  if (most && parts.free && !only_free) {
    return schema_error(place.pointer + "/maxProperties",
                        "it is not enforced beside properties and additionalProperties");
  }
  if (most && only_free && *most == 0) {
    return std::string("none");
  }
  return most && only_free ? fmt::format("{{0,{}}}", *most - 1) : std::string("*");
}

/// Members in their order, of which those may be left out that are not required. Rules of what
/// follows a member, and of what is first, are written from the last member on.
std::string members_body(const ObjectParts& parts, SchemaWriter& writer) {
  std::string free;
  if (parts.free) {
    free = writer.add_rule("f", parts.free->key + " json_colon " + parts.free->value);
  }
  std::string after = parts.free ? fmt::format("(json_comma {})*", free) : "\"\"";
  std::string first = parts.free ? fmt::format("({} {})?", free, after) : "\"\"";
  bool may_be_empty = true;
  for (size_t i = parts.members.size(); i-- > 0;) {
    const Member& member = parts.members[i];
    after = writer.add_rule("a", after);
    const std::string next = fmt::format("json_comma {} {}", member.rule, after);
    const std::string here = fmt::format("{} {}", member.rule, after);
    first = member.required ? here : fmt::format("{} | {}", here, writer.add_rule("b", first));
    after = member.required ? next : fmt::format("{} | {}", next, after);
    may_be_empty = may_be_empty && !member.required;
  }
  return may_be_empty ? fmt::format("({})", first) : writer.add_rule("b", first);
}

}  // namespace

Result<std::string> object_body(const SchemaPlace& place, SchemaWriter& writer) {
  NIBBLE_ASSIGN_OR_RETURN(const ObjectParts parts, read_object(place, writer));
  NIBBLE_ASSIGN_OR_RETURN(const std::string times, repetitions(place, parts));
  if (times == "none" || (parts.members.empty() && !parts.free)) {
    return std::string(R"("{" json_blank "}")");
  }
  if (!parts.members.empty()) {
    return fmt::format(R"("{{" json_blank {} json_blank "}}")", members_body(parts, writer));
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto least, schema_count(place, "minProperties"));
  const std::string free =
      writer.add_rule("f", parts.free->key + " json_colon " + parts.free->value);
  const std::string some = fmt::format("{} (json_comma {}){}", free, free, times);
  return least.value_or(0) > 0 ? fmt::format(R"("{{" json_blank {} json_blank "}}")", some)
                               : fmt::format(R"("{{" json_blank ({} json_blank)? "}}")", some);
}

}  // namespace nibble
