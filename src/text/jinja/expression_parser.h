#pragma once

#include <initializer_list>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/token_stream.h"

namespace nibble::jinja {

/// Parses expressions off a token stream. Errors: kInvalidArgument with the line; nesting beyond
/// kMaxDepth is refused, so that walking the tree needs little stack.
class ExpressionParser final {
 public:
  static constexpr int kMaxDepth = 200;
  enum class Conditional { kAllowed, kNotAllowed };

  explicit ExpressionParser(TokenStream& tokens) : tokens_(tokens) {}

  Result<ExprPtr> parse(Conditional conditional = Conditional::kAllowed);
  /// An expression, or a tuple without parentheses; `end` are names that end it.
  Result<ExprPtr> parse_tuple(Conditional conditional, std::initializer_list<std::string_view> end);
  /// What a for or set assigns to: a name, a.b, or a tuple of names.
  Result<ExprPtr> parse_target();
  /// Filters after "|" applied to `subject`.
  Result<ExprPtr> parse_filters(ExprPtr subject);
  /// One filter without its "|".
  Result<ExprPtr> parse_filter(ExprPtr subject);
  Result<ExprPtr> parse_unary(bool with_filters);

  /// Names used as varargs, kwargs or caller since the last reset (the macro parser asks).
  struct SpecialNames {
    bool varargs = false;
    bool kwargs = false;
    bool caller = false;
  };
  SpecialNames special_names;

 private:
  Result<ExprPtr> parse_conditional();
  Result<ExprPtr> parse_or();
  Result<ExprPtr> parse_and();
  Result<ExprPtr> parse_not();
  Result<ExprPtr> parse_compare();
  Result<ExprPtr> parse_sum();
  Result<ExprPtr> parse_concat();
  Result<ExprPtr> parse_product();
  Result<ExprPtr> parse_power();
  Result<ExprPtr> parse_primary();
  Result<ExprPtr> parse_name();
  Result<ExprPtr> parse_number();
  Result<ExprPtr> parse_list();
  Result<ExprPtr> parse_dict();
  Result<ExprPtr> parse_parentheses();
  Result<ExprPtr> parse_postfix(ExprPtr subject);
  Result<ExprPtr> parse_call(ExprPtr subject);
  Result<ExprPtr> parse_subscript(ExprPtr subject);
  Result<ExprPtr> parse_attribute(ExprPtr subject);
  Result<ExprPtr> parse_test(ExprPtr subject);
  Result<std::vector<Argument>> parse_arguments();
  Result<ExprPtr> finish(ExprPtr expr) const;
  [[nodiscard]] ExprPtr make(ExprKind kind) const;

  TokenStream& tokens_;
  int nesting_ = 0;
};

}  // namespace nibble::jinja
