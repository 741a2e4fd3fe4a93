#include <array>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "text/grammar/ebnf.h"
#include "text/grammar/grammar_cost.h"
#include "text/grammar/regex_check.h"
#include "text/grammar/schema_writer.h"

namespace nibble {
namespace {

using Format = std::pair<std::string_view, std::string_view>;

#define NIBBLE_DATE \
  R"((\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))|(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29))"
#define NIBBLE_TIME R"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d))"
#define NIBBLE_LABEL R"([A-Za-z0-9]+(-[A-Za-z0-9]+)*)"
#define NIBBLE_BYTE R"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d))"

// Formats as regular expressions, each a part of what its standard allows: RFC 3339 (date, time,
// duration), 5321 (email, without quotes), 1123 (hostname), 2673 and 4291
// (addresses), 4122 (uuid), 3986 (uri, with ASCII alone).
constexpr std::array kFormats = {
    Format{"date", NIBBLE_DATE},
    Format{"time", NIBBLE_TIME},
    Format{"date-time", NIBBLE_DATE "T" NIBBLE_TIME},
    Format{
        "duration",
        R"(P(\d{1,6}W|\d{1,6}(Y(\d{1,6}M(\d{1,6}D)?)?|M(\d{1,6}D)?|D)(T\d{1,6}(H(\d{1,6}M(\d{1,6}S)?)?|M(\d{1,6}S)?|S))?|T\d{1,6}(H(\d{1,6}M(\d{1,6}S)?)?|M(\d{1,6}S)?|S)))"},
    Format{"email",
           R"([A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@)" NIBBLE_LABEL R"((\.)" NIBBLE_LABEL ")+"},
    Format{"hostname", NIBBLE_LABEL R"((\.)" NIBBLE_LABEL ")*"},
    Format{"ipv4", "(" NIBBLE_BYTE R"(\.){3})" NIBBLE_BYTE},
    Format{
        "ipv6",
        R"((([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}|::([0-9a-f]{1,4}:){0,5}[0-9a-f]{1,4}|::))"},
    Format{"uuid", R"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"},
    Format{
        "uri",
        R"([A-Za-z][A-Za-z0-9+.\-]*://)" NIBBLE_LABEL R"((\.)" NIBBLE_LABEL
        R"()*(:[1-9]\d{0,3})?(/([A-Za-z0-9._~!$&'()*+,;=:@\-]|%[0-9A-Fa-f][0-9A-Fa-f])*)*(\?([A-Za-z0-9._~!$&'()*+,;=:@/\-]|%[0-9A-Fa-f][0-9A-Fa-f])*)?)"},
};
#undef NIBBLE_DATE
#undef NIBBLE_TIME
#undef NIBBLE_LABEL
#undef NIBBLE_BYTE

std::string quoted_pattern(std::string_view expression) {
  return fmt::format(R"("\"" {} "\"")", expression);
}

Result<std::string> format_body(const SchemaPlace& place, SchemaWriter& writer) {
  const Json& name = *place.find("format");
  std::string known;
  for (const auto& [format, pattern] : kFormats) {
    if (name.is_string() && name.as_string() == format) {
      NIBBLE_ASSIGN_OR_RETURN(const CheckedRegex whole,
                              check_regex(pattern, RegexPlace::kJsonString));
      return writer.costly_rule(place.pointer + "/format", quoted_pattern(whole.ebnf), whole.cost);
    }
    known += known.empty() ? "" : ", ";
    known += format;
  }
  return schema_error(
      place.pointer + "/format",
      fmt::format("this format is not enforced; use one of {}, or leave it out", known));
}

Result<std::string> pattern_body(const SchemaPlace& place, SchemaWriter& writer) {
  const Json& pattern = *place.find("pattern");
  if (!pattern.is_string()) {
    return schema_error(place.pointer + "/pattern", "expected a string");
  }
  auto whole = check_regex(pattern.as_string(), RegexPlace::kJsonString);
  if (!whole.ok()) {
    return whole.status().with_context(place.pointer + "/pattern");
  }
  return writer.costly_rule(place.pointer + "/pattern", quoted_pattern(whole->ebnf), whole->cost);
}

struct Lengths {
  int64_t least = 0;
  std::optional<int64_t> most;
};

// Each character that a string must have is a state of the grammar, which takes as long to prepare
// as a whole string.
constexpr int64_t kMostLeast = 32;
// One character, as in json_string, but without pairs of surrogates, which readers count as one.
constexpr std::string_view kCharacter =
    R"(([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u([0-9a-cA-CefEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})))";

Result<std::string> bounded_body(const SchemaPlace& place,
                                 const Lengths& lengths,
                                 SchemaWriter& writer) {
  if (lengths.most && lengths.least > *lengths.most) {
    return schema_error(place.pointer + "/minLength", "above maxLength: no string is allowed");
  }
  if (lengths.least > kMostLeast) {
    return schema_error(place.pointer + "/minLength",
                        fmt::format("more than {} is not enforced", kMostLeast));
  }
  if (lengths.most && *lengths.most == 0) {
    return std::string(R"("\"\"")");
  }
  std::string body;
  for (int64_t i = 0; i < lengths.least; ++i) {
    body += kCharacter;
  }
  body = ebnf_regex(body + std::string(kCharacter) + "*");
  const int64_t cost = (lengths.least + 1) * kStringCharacterCost;
  const std::string pointer = place.pointer + (lengths.most ? "/maxLength" : "/minLength");
  NIBBLE_ASSIGN_OR_RETURN(const std::string rule,
                          lengths.most ? writer.limited_rule(pointer, body, *lengths.most, cost)
                                       : writer.costly_rule(pointer, body, cost));
  return fmt::format(R"("\"" {} "\"")", rule);
}

}  // namespace

Result<std::string> string_body(const SchemaPlace& place, SchemaWriter& writer) {
  NIBBLE_ASSIGN_OR_RETURN(const auto least, schema_count(place, "minLength"));
  NIBBLE_ASSIGN_OR_RETURN(const auto most, schema_count(place, "maxLength"));
  const bool bounded = least.value_or(0) > 0 || most.has_value();
  const bool pattern = place.find("pattern") != nullptr;
  const bool format = place.find("format") != nullptr;
  if (pattern && format) {
    return schema_error(place.pointer + "/format", "format beside pattern is not enforced");
  }
  if (bounded && (pattern || format)) {
    return schema_error(place.pointer + (most ? "/maxLength" : "/minLength"),
                        fmt::format("a length beside {} is not enforced; put it into the pattern",
                                    pattern ? "pattern" : "format"));
  }
  if (pattern) {
    return pattern_body(place, writer);
  }
  if (format) {
    return format_body(place, writer);
  }
  return bounded ? bounded_body(place, {.least = least.value_or(0), .most = most}, writer)
                 : std::string("json_string");
}

}  // namespace nibble
