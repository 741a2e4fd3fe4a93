#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "base/status.h"
#include "text/grammar/schema_budget.h"

namespace nibble {

/// Makes grammars of JSON schemas (drafts 7 to 2020-12): every text that the grammar allows is JSON
/// that the schema accepts. Not everything that the schema accepts is allowed: members come in the
/// schema's order, objects with `properties` are closed unless it says otherwise, `pattern` and
/// `format` hold for all of a string and leave out escapes, numbers with bounds have at most six
/// decimals and no exponent. What a grammar cannot enforce is refused, never left out; members that
/// no draft knows say nothing, as there.
///
/// Several schemas can become rules of one grammar: text() collects them all.
class JsonSchemaGrammar final {
 public:
  JsonSchemaGrammar() : JsonSchemaGrammar(std::make_shared<SchemaBudget>()) {}
  /// For schemas that share what they may cost with others, of another grammar.
  explicit JsonSchemaGrammar(std::shared_ptr<SchemaBudget> budget) : budget_(std::move(budget)) {}

  /// Adds the rules of a schema and returns the name of its first one.
  /// Errors: kInvalidArgument with a JSON pointer ("#/properties/a/not: ...") for what cannot be
  /// enforced, for what is no schema, above 4096 rules or 1 MiB of grammar, and where all that was
  /// added is more than a SchemaBudget has.
  Result<std::string> add(const Json& schema);
  /// The rule of any JSON object.
  [[nodiscard]] static std::string_view any_object() { return "json_object"; }
  /// Rules for everything that was added, in EBNF, without "root".
  [[nodiscard]] std::string text() const;
  /// For GrammarText.
  [[nodiscard]] int64_t shortest_limit() const { return shortest_limit_; }

 private:
  std::shared_ptr<SchemaBudget> budget_;
  std::string rules_;
  int64_t count_ = 0;
  int64_t shortest_limit_ = 0;
};

}  // namespace nibble
