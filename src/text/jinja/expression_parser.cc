#include "text/jinja/expression_parser.h"

#include <algorithm>
#include <cstdlib>

namespace nibble::jinja {
namespace {

bool is_one_of(const Token& token, std::initializer_list<std::string_view> names) {
  return token.kind == TokenKind::kName &&
         std::find(names.begin(), names.end(), token.text) != names.end();
}

Operator comparison_of(const Token& token) {
  constexpr std::pair<std::string_view, Operator> kComparisons[] = {
      {"==", Operator::kEqual},     {"!=", Operator::kNotEqual}, {"<", Operator::kLess},
      {"<=", Operator::kLessEqual}, {">", Operator::kGreater},   {">=", Operator::kGreaterEqual}};
  for (const auto& [text, op] : kComparisons) {
    if (token.is_operator(text)) {
      return op;
    }
  }
  return Operator::kNone;
}

}  // namespace

ExprPtr ExpressionParser::make(ExprKind kind) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = tokens_.line();
  return expr;
}

// Computes the depth and refuses trees that are too deep to walk.
Result<ExprPtr> ExpressionParser::finish(ExprPtr expr) const {
  int below = 0;
  for (const ExprPtr& child : expr->children) {
    below = child == nullptr ? below : std::max(below, child->depth);
  }
  for (const Argument& argument : expr->arguments) {
    below = std::max(below, argument.value->depth);
  }
  expr->depth = below + 1;
  if (expr->depth > kMaxDepth) {
    return make_error(StatusCode::kInvalidArgument, "line {}: the expression is nested too deeply",
                      expr->line);
  }
  return expr;
}

Result<ExprPtr> ExpressionParser::parse(Conditional conditional) {
  if (nesting_ >= kMaxDepth) {
    return tokens_.error("the expression is nested too deeply");
  }
  ++nesting_;
  Result<ExprPtr> expr = conditional == Conditional::kAllowed ? parse_conditional() : parse_or();
  --nesting_;
  return expr;
}

Result<ExprPtr> ExpressionParser::parse_conditional() {
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr left, parse_or());
  while (tokens_.current().is_name("if")) {
    ExprPtr expr = make(ExprKind::kConditional);
    tokens_.take();
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr condition, parse_or());
    ExprPtr otherwise;
    if (tokens_.take_name("else")) {
      NIBBLE_ASSIGN_OR_RETURN(otherwise, parse());
    }
    expr->children.push_back(std::move(condition));
    expr->children.push_back(std::move(left));
    expr->children.push_back(std::move(otherwise));
    NIBBLE_ASSIGN_OR_RETURN(left, finish(std::move(expr)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::parse_or() {
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr left, parse_and());
  while (tokens_.current().is_name("or")) {
    ExprPtr expr = make(ExprKind::kOr);
    tokens_.take();
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr right, parse_and());
    expr->children.push_back(std::move(left));
    expr->children.push_back(std::move(right));
    NIBBLE_ASSIGN_OR_RETURN(left, finish(std::move(expr)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::parse_and() {
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr left, parse_not());
  while (tokens_.current().is_name("and")) {
    ExprPtr expr = make(ExprKind::kAnd);
    tokens_.take();
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr right, parse_not());
    expr->children.push_back(std::move(left));
    expr->children.push_back(std::move(right));
    NIBBLE_ASSIGN_OR_RETURN(left, finish(std::move(expr)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::parse_not() {
  std::vector<ExprPtr> negations;
  while (tokens_.current().is_name("not")) {
    negations.push_back(make(ExprKind::kUnary));
    tokens_.take();
    if (negations.size() > kMaxDepth) {
      return tokens_.error("the expression is nested too deeply");
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr expr, parse_compare());
  for (auto negation = negations.rbegin(); negation != negations.rend(); ++negation) {
    (*negation)->operators = {Operator::kNot};
    (*negation)->children.push_back(std::move(expr));
    NIBBLE_ASSIGN_OR_RETURN(expr, finish(std::move(*negation)));
  }
  return expr;
}

Result<ExprPtr> ExpressionParser::parse_compare() {
  ExprPtr expr = make(ExprKind::kCompare);
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr first, parse_sum());
  expr->children.push_back(std::move(first));
  while (true) {
    Operator op = comparison_of(tokens_.current());
    if (op != Operator::kNone) {
      tokens_.take();
    } else if (tokens_.take_name("in")) {
      op = Operator::kIn;
    } else if (tokens_.current().is_name("not") && tokens_.next().is_name("in")) {
      tokens_.take();
      tokens_.take();
      op = Operator::kNotIn;
    } else {
      break;
    }
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr right, parse_sum());
    expr->operators.push_back(op);
    expr->children.push_back(std::move(right));
  }
  if (expr->operators.empty()) {
    return std::move(expr->children.front());
  }
  return finish(std::move(expr));
}

Result<ExprPtr> ExpressionParser::parse_sum() {
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr left, parse_concat());
  while (tokens_.current().is_operator("+") || tokens_.current().is_operator("-")) {
    ExprPtr expr = make(ExprKind::kBinary);
    expr->operators = {tokens_.take().text == "+" ? Operator::kAdd : Operator::kSubtract};
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr right, parse_concat());
    expr->children.push_back(std::move(left));
    expr->children.push_back(std::move(right));
    NIBBLE_ASSIGN_OR_RETURN(left, finish(std::move(expr)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::parse_concat() {
  ExprPtr expr = make(ExprKind::kConcat);
  do {
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr part, parse_product());
    expr->children.push_back(std::move(part));
  } while (tokens_.take_operator("~"));
  if (expr->children.size() == 1) {
    return std::move(expr->children.front());
  }
  return finish(std::move(expr));
}

Result<ExprPtr> ExpressionParser::parse_product() {
  constexpr std::pair<std::string_view, Operator> kProducts[] = {{"*", Operator::kMultiply},
                                                                 {"/", Operator::kDivide},
                                                                 {"//", Operator::kFloorDivide},
                                                                 {"%", Operator::kModulo}};
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr left, parse_power());
  while (true) {
    const auto* const product =
        std::find_if(std::begin(kProducts), std::end(kProducts),
                     [&](const auto& entry) { return tokens_.current().is_operator(entry.first); });
    if (product == std::end(kProducts)) {
      return left;
    }
    ExprPtr expr = make(ExprKind::kBinary);
    tokens_.take();
    expr->operators = {product->second};
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr right, parse_power());
    expr->children.push_back(std::move(left));
    expr->children.push_back(std::move(right));
    NIBBLE_ASSIGN_OR_RETURN(left, finish(std::move(expr)));
  }
}

Result<ExprPtr> ExpressionParser::parse_power() {
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr left, parse_unary(true));
  while (tokens_.current().is_operator("**")) {
    ExprPtr expr = make(ExprKind::kBinary);
    tokens_.take();
    expr->operators = {Operator::kPower};
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr right, parse_unary(true));
    expr->children.push_back(std::move(left));
    expr->children.push_back(std::move(right));
    NIBBLE_ASSIGN_OR_RETURN(left, finish(std::move(expr)));
  }
  return left;
}

Result<ExprPtr> ExpressionParser::parse_unary(bool with_filters) {
  ExprPtr expr;
  if (tokens_.current().is_operator("-") || tokens_.current().is_operator("+")) {
    if (nesting_ >= kMaxDepth) {
      return tokens_.error("the expression is nested too deeply");
    }
    ExprPtr sign = make(ExprKind::kUnary);
    sign->operators = {tokens_.take().text == "-" ? Operator::kNegate : Operator::kPlus};
    ++nesting_;
    Result<ExprPtr> operand = parse_unary(false);
    --nesting_;
    NIBBLE_RETURN_IF_ERROR(operand.status());
    sign->children.push_back(std::move(operand).value());
    NIBBLE_ASSIGN_OR_RETURN(expr, finish(std::move(sign)));
  } else {
    NIBBLE_ASSIGN_OR_RETURN(expr, parse_primary());
  }
  NIBBLE_ASSIGN_OR_RETURN(expr, parse_postfix(std::move(expr)));
  return with_filters ? parse_filters(std::move(expr)) : std::move(expr);
}

Result<ExprPtr> ExpressionParser::parse_filters(ExprPtr subject) {
  while (true) {
    if (tokens_.take_operator("|")) {
      NIBBLE_ASSIGN_OR_RETURN(subject, parse_filter(std::move(subject)));
    } else if (tokens_.current().is_name("is")) {
      NIBBLE_ASSIGN_OR_RETURN(subject, parse_test(std::move(subject)));
    } else if (tokens_.current().is_operator("(")) {
      NIBBLE_ASSIGN_OR_RETURN(subject, parse_call(std::move(subject)));
    } else {
      return subject;
    }
  }
}

Result<ExprPtr> ExpressionParser::parse_filter(ExprPtr subject) {
  ExprPtr filter = make(ExprKind::kFilter);
  NIBBLE_ASSIGN_OR_RETURN(filter->name, tokens_.expect_identifier());
  filter->children.push_back(std::move(subject));
  if (tokens_.current().is_operator("(")) {
    NIBBLE_ASSIGN_OR_RETURN(filter->arguments, parse_arguments());
  }
  return finish(std::move(filter));
}

Result<ExprPtr> ExpressionParser::parse_test(ExprPtr subject) {
  ExprPtr test = make(ExprKind::kTest);
  tokens_.take();
  const bool is_negated = tokens_.take_name("not");
  NIBBLE_ASSIGN_OR_RETURN(test->name, tokens_.expect_identifier());
  test->children.push_back(std::move(subject));
  const Token& token = tokens_.current();
  const bool starts_value = token.kind == TokenKind::kName || token.kind == TokenKind::kString ||
                            token.kind == TokenKind::kInteger || token.kind == TokenKind::kFloat ||
                            token.is_operator("[") || token.is_operator("{");
  if (token.is_operator("(")) {
    NIBBLE_ASSIGN_OR_RETURN(test->arguments, parse_arguments());
  } else if (starts_value && !is_one_of(token, {"else", "or", "and"})) {
    if (token.is_name("is")) {
      return tokens_.error("tests with 'is' cannot be chained");
    }
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr value, parse_primary());
    NIBBLE_ASSIGN_OR_RETURN(value, parse_postfix(std::move(value)));
    test->arguments.push_back({Argument::Kind::kPositional, "", std::move(value)});
  }
  ExprPtr negation = is_negated ? make(ExprKind::kUnary) : nullptr;
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr expr, finish(std::move(test)));
  if (negation == nullptr) {
    return expr;
  }
  negation->operators = {Operator::kNot};
  negation->children.push_back(std::move(expr));
  return finish(std::move(negation));
}

Result<ExprPtr> ExpressionParser::parse_call(ExprPtr subject) {
  ExprPtr call = make(ExprKind::kCall);
  call->children.push_back(std::move(subject));
  NIBBLE_ASSIGN_OR_RETURN(call->arguments, parse_arguments());
  return finish(std::move(call));
}

Result<std::vector<Argument>> ExpressionParser::parse_arguments() {
  NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator("("));
  std::vector<Argument> arguments;
  auto last = Argument::Kind::kPositional;
  while (!tokens_.take_operator(")")) {
    if (!arguments.empty()) {
      NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(","));
      if (tokens_.take_operator(")")) {
        break;
      }
    }
    Argument argument;
    if (tokens_.take_operator("*")) {
      argument.kind = Argument::Kind::kSpread;
    } else if (tokens_.take_operator("**")) {
      argument.kind = Argument::Kind::kSpreadNamed;
    } else if (tokens_.current().kind == TokenKind::kName && tokens_.next().is_operator("=")) {
      argument.kind = Argument::Kind::kNamed;
      argument.name = tokens_.take().text;
      tokens_.take();
    }
    const bool is_named_after_spread =
        argument.kind == Argument::Kind::kNamed && last == Argument::Kind::kSpread;
    if (argument.kind < last && !is_named_after_spread) {
      return tokens_.error("positional arguments come before named ones");
    }
    last = argument.kind;
    NIBBLE_ASSIGN_OR_RETURN(argument.value, parse());
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

}  // namespace nibble::jinja
