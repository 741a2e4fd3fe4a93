#include "text/grammar/json_schema_grammar.h"

#include <algorithm>

#include <fmt/format.h>

#include "text/grammar/schema_writer.h"

namespace nibble {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;

// JSON as RFC 8259 has it, but for blanks where nobody writes any, lone surrogates and exponents of
// more than two digits, which would be infinities.
constexpr std::string_view kJson = R"(json_blank ::= "" | " " | "\n" [ \t]*
json_comma ::= "," json_blank
json_colon ::= ":" " "?
json_rest ::= [^\"\\\x00-\x1f]* "\""
json_string ::= "\"" Regex("([^\"\\\\\\x00-\\x1f]|\\\\([\"\\\\/bfnrt]|u([0-9a-cA-CefEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}|u[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2}))*") "\""
json_integer ::= "-"? ("0" | [1-9] [0-9]*)
json_number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\-]? [0-9] [0-9]?)?
json_member ::= json_string json_colon json_value
json_object ::= "{" json_blank (json_member (json_comma json_member)* json_blank)? "}"
json_array ::= "[" json_blank (json_value (json_comma json_value)* json_blank)? "]"
json_value ::= json_object | json_array | json_string | json_number | "true" | "false" | "null"
)";

}  // namespace

Result<std::string> JsonSchemaGrammar::add(const Json& schema) {
  NIBBLE_RETURN_IF_ERROR(budget_->take_bytes(schema.dump().size()));
  SchemaWriter writer(schema, fmt::format("g{}_", count_++), *budget_);
  NIBBLE_ASSIGN_OR_RETURN(std::string name, writer.write());
  rules_ += writer.rules();
  if (writer.shortest_limit() > 0) {
    shortest_limit_ = shortest_limit_ == 0 ? writer.shortest_limit()
                                           : std::min(shortest_limit_, writer.shortest_limit());
  }
  if (rules_.size() > kMostBytes) {
    return make_error(StatusCode::kInvalidArgument, "the schemas together are too large");
  }
  return name;
}

std::string JsonSchemaGrammar::text() const { return rules_ + std::string(kJson); }

}  // namespace nibble
