#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/grammar/schema_budget.h"

namespace nibble {

/// A schema and where it stands: "#/properties/a".
struct SchemaPlace {
  const Json* schema = nullptr;
  std::string pointer;

  [[nodiscard]] SchemaPlace member(std::string_view key) const;
  [[nodiscard]] SchemaPlace item(std::string_view key, size_t index) const;
  [[nodiscard]] SchemaPlace entry(std::string_view key, std::string_view name) const;
  /// The member; null where the schema has none.
  [[nodiscard]] const Json* find(std::string_view key) const { return schema->find(key); }
};

[[nodiscard]] Status schema_error(std::string_view pointer, std::string_view message);
/// A pointer that goes on, as far as messages show it: names may have any length.
[[nodiscard]] std::string shown_pointer(const std::string& pointer, std::string_view more);

/// Writes the rules of one schema: one for each schema within it, without recursion. What a
/// keyword means is in schema_objects.cc, schema_arrays.cc, schema_strings.cc, schema_numbers.cc.
class SchemaWriter final {
 public:
  /// Names begin with `prefix`. The root and the budget outlive this.
  SchemaWriter(const Json& root, std::string prefix, SchemaBudget& budget)
      : root_(root), prefix_(std::move(prefix)), budget_(budget) {}

  /// Writes all rules and returns the name of the root's.
  Result<std::string> write();
  [[nodiscard]] const std::string& rules() const { return rules_; }

  // For the files of the types.

  /// The rule of a schema, which is written later.
  std::string rule_of(const SchemaPlace& place);
  /// Writes a rule of its own for a part, and returns its name.
  std::string add_rule(std::string_view hint, std::string_view body);
  /// A rule for a part that takes long to prepare: the same one for the same part. The errors of
  /// SchemaBudget::take_cost().
  Result<std::string> costly_rule(const std::string& pointer, std::string body, int64_t cost);
  /// The same for the characters of a string, at most `most` of them.
  Result<std::string> limited_rule(const std::string& pointer,
                                   const std::string& body,
                                   int64_t most,
                                   int64_t cost);
  /// Of this schema and others of the same grammar.
  [[nodiscard]] SchemaBudget& budget() { return budget_; }
  /// The smallest `most`; 0 without any.
  [[nodiscard]] int64_t shortest_limit() const { return shortest_limit_; }

 private:
  Result<std::string> body_of(const SchemaPlace& place);
  Result<std::string> reference(const SchemaPlace& place);
  Result<std::string> choice(const SchemaPlace& place, std::string_view keyword);
  Result<std::string> values(const SchemaPlace& place);
  Result<std::string> typed(const SchemaPlace& place);
  Result<std::string> one_type(const SchemaPlace& place, std::string_view type);
  [[nodiscard]] Result<SchemaPlace> resolve(const SchemaPlace& place);
  /// A reference, or a choice, that leads back to itself without a value between.
  [[nodiscard]] Status check_aliases() const;
  /// Follows references, as far as they go.
  [[nodiscard]] Result<SchemaPlace> target_of(SchemaPlace place);
  Status check_disjoint(const SchemaPlace& place, const JsonArray& options);

  const Json& root_;
  std::string prefix_;
  SchemaBudget& budget_;
  std::string rules_;
  std::deque<std::pair<SchemaPlace, std::string>> waiting_;  // with the names of their rules
  std::unordered_map<const Json*, std::string> names_;
  // By name of a rule: those that it is, or may be, without a character between.
  std::vector<std::pair<std::string, std::string>> aliases_;
  std::unordered_map<std::string, std::string> pointers_;  // of rules
  std::unordered_map<std::string, std::string> costly_;    // by their bodies
  std::string current_;                                    // the rule being written
  int64_t next_ = 0;
  int64_t shortest_limit_ = 0;
};

// Bodies of the rules for values of one type.
Result<std::string> object_body(const SchemaPlace& place, SchemaWriter& writer);
Result<std::string> array_body(const SchemaPlace& place, SchemaWriter& writer);
Result<std::string> string_body(const SchemaPlace& place, SchemaWriter& writer);
Result<std::string> number_body(const SchemaPlace& place);
Result<std::string> integer_body(const SchemaPlace& place);

/// A count such as minItems; nothing where it is absent. Errors: no integer from 0 to 65536.
Result<std::optional<int64_t>> schema_count(const SchemaPlace& place, std::string_view key);

}  // namespace nibble
