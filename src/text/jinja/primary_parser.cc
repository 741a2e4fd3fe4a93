#include <algorithm>
#include <cstdlib>

#include "text/jinja/expression_parser.h"

namespace nibble::jinja {

Result<ExprPtr> ExpressionParser::parse_primary() {
  const Token& token = tokens_.current();
  switch (token.kind) {
    case TokenKind::kName:
      return parse_name();
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return parse_number();
    case TokenKind::kString: {
      ExprPtr expr = make(ExprKind::kConstant);
      std::string text;
      while (tokens_.current().kind == TokenKind::kString) {  // neighbours join
        text += tokens_.take().text;
      }
      expr->constant = Value::string(std::move(text));
      return expr;
    }
    default:
      break;
  }
  if (token.is_operator("(")) {
    return parse_parentheses();
  }
  if (token.is_operator("[")) {
    return parse_list();
  }
  return token.is_operator("{") ? parse_dict() : tokens_.unexpected("an expression");
}

Result<ExprPtr> ExpressionParser::parse_name() {
  ExprPtr expr = make(ExprKind::kConstant);
  const std::string name = tokens_.take().text;
  if (name == "true" || name == "True") {
    expr->constant = Value::boolean(true);
  } else if (name == "false" || name == "False") {
    expr->constant = Value::boolean(false);
  } else if (name == "none" || name == "None") {
    expr->constant = Value::none();
  } else {
    expr->kind = ExprKind::kName;
    expr->name = name;
    special_names.varargs = special_names.varargs || name == "varargs";
    special_names.kwargs = special_names.kwargs || name == "kwargs";
    special_names.caller = special_names.caller || name == "caller";
  }
  return expr;
}

Result<ExprPtr> ExpressionParser::parse_number() {
  ExprPtr expr = make(ExprKind::kConstant);
  const bool is_float = tokens_.current().kind == TokenKind::kFloat;
  std::string digits = tokens_.take().text;
  std::erase(digits, '_');
  if (is_float) {
    expr->constant = Value::real(std::strtod(digits.c_str(), nullptr));
    return expr;
  }
  const bool has_prefix = digits.size() > 1 && digits[0] == '0' && digits[1] > '9';
  const char prefix = has_prefix ? static_cast<char>(digits[1] | 0x20) : ' ';
  const int base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
  Integer value = 0;
  for (const char c : digits.substr(has_prefix ? 2 : 0)) {
    const int digit = c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
    Integer next = 0;
    if (digit >= base || __builtin_mul_overflow(value, Integer{base}, &next) ||
        __builtin_add_overflow(next, Integer{digit}, &value)) {
      return tokens_.error(fmt::format("'{}' is no integer that fits", digits));
    }
  }
  if (has_prefix && digits.size() == 2) {
    return tokens_.error(fmt::format("'{}' is no integer", digits));
  }
  expr->constant = Value::integer(value);
  return expr;
}

Result<ExprPtr> ExpressionParser::parse_list() {
  ExprPtr expr = make(ExprKind::kList);
  tokens_.take();
  while (!tokens_.take_operator("]")) {
    if (!expr->children.empty()) {
      NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(","));
      if (tokens_.take_operator("]")) {
        break;
      }
    }
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr item, parse());
    expr->children.push_back(std::move(item));
  }
  return finish(std::move(expr));
}

Result<ExprPtr> ExpressionParser::parse_dict() {
  ExprPtr expr = make(ExprKind::kDict);
  tokens_.take();
  while (!tokens_.take_operator("}")) {
    if (!expr->children.empty()) {
      NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(","));
      if (tokens_.take_operator("}")) {
        break;
      }
    }
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr key, parse());
    NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(":"));
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr value, parse());
    expr->children.push_back(std::move(key));
    expr->children.push_back(std::move(value));
  }
  return finish(std::move(expr));
}

Result<ExprPtr> ExpressionParser::parse_parentheses() {
  ExprPtr empty = make(ExprKind::kTuple);
  tokens_.take();
  if (tokens_.take_operator(")")) {
    return empty;
  }
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr expr, parse_tuple(Conditional::kAllowed, {}));
  NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(")"));
  return expr;
}

Result<ExprPtr> ExpressionParser::parse_tuple(Conditional conditional,
                                              std::initializer_list<std::string_view> end) {
  ExprPtr tuple = make(ExprKind::kTuple);
  NIBBLE_ASSIGN_OR_RETURN(ExprPtr first, parse(conditional));
  if (!tokens_.current().is_operator(",")) {
    return first;
  }
  tuple->children.push_back(std::move(first));
  while (tokens_.take_operator(",")) {
    const Token& token = tokens_.current();
    const bool ends = token.is_operator(")") || token.kind == TokenKind::kBlockEnd ||
                      token.kind == TokenKind::kPrintEnd || token.is_operator("=") ||
                      std::any_of(end.begin(), end.end(),
                                  [&](std::string_view name) { return token.is_name(name); });
    if (ends) {
      break;
    }
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr item, parse(conditional));
    tuple->children.push_back(std::move(item));
  }
  return finish(std::move(tuple));
}

Result<ExprPtr> ExpressionParser::parse_target() {
  const auto parse_one = [this]() -> Result<ExprPtr> {
    ExprPtr target = make(ExprKind::kName);
    const bool is_parenthesised = tokens_.take_operator("(");
    if (is_parenthesised) {
      NIBBLE_ASSIGN_OR_RETURN(target, parse_target());
      NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator(")"));
      return target;
    }
    NIBBLE_ASSIGN_OR_RETURN(target->name, tokens_.expect_identifier());
    for (const std::string_view constant : {"true", "false", "none", "True", "False", "None"}) {
      if (target->name == constant) {
        return tokens_.error(fmt::format("cannot assign to '{}'", constant));
      }
    }
    return target;
  };
  if (nesting_ >= kMaxDepth) {
    return tokens_.error("the assignment is nested too deeply");
  }
  ++nesting_;
  Result<ExprPtr> first = parse_one();
  NIBBLE_RETURN_IF_ERROR(first.status());
  ExprPtr target = std::move(first).value();
  if (target->kind == ExprKind::kName && tokens_.current().is_operator(".")) {
    NIBBLE_ASSIGN_OR_RETURN(target, parse_attribute(std::move(target)));
  } else if (tokens_.current().is_operator(",")) {
    ExprPtr tuple = make(ExprKind::kTuple);
    tuple->children.push_back(std::move(target));
    while (tokens_.take_operator(",") &&
           (tokens_.current().kind == TokenKind::kName || tokens_.current().is_operator("(")) &&
           !tokens_.current().is_name("in")) {
      NIBBLE_ASSIGN_OR_RETURN(ExprPtr item, parse_one());
      tuple->children.push_back(std::move(item));
    }
    NIBBLE_ASSIGN_OR_RETURN(target, finish(std::move(tuple)));
  }
  --nesting_;
  return target;
}

Result<ExprPtr> ExpressionParser::parse_postfix(ExprPtr subject) {
  while (true) {
    if (tokens_.current().is_operator(".")) {
      NIBBLE_ASSIGN_OR_RETURN(subject, parse_attribute(std::move(subject)));
    } else if (tokens_.current().is_operator("[")) {
      NIBBLE_ASSIGN_OR_RETURN(subject, parse_subscript(std::move(subject)));
    } else if (tokens_.current().is_operator("(")) {
      NIBBLE_ASSIGN_OR_RETURN(subject, parse_call(std::move(subject)));
    } else {
      return subject;
    }
  }
}

Result<ExprPtr> ExpressionParser::parse_attribute(ExprPtr subject) {
  ExprPtr expr = make(ExprKind::kAttribute);
  tokens_.take();
  expr->children.push_back(std::move(subject));
  if (tokens_.current().kind == TokenKind::kInteger) {  // a.0 is a[0]
    NIBBLE_ASSIGN_OR_RETURN(ExprPtr index, parse_number());
    expr->kind = ExprKind::kItem;
    expr->children.push_back(std::move(index));
  } else {
    NIBBLE_ASSIGN_OR_RETURN(expr->name, tokens_.expect_identifier());
  }
  return finish(std::move(expr));
}

Result<ExprPtr> ExpressionParser::parse_subscript(ExprPtr subject) {
  ExprPtr expr = make(ExprKind::kItem);
  tokens_.take();
  expr->children.push_back(std::move(subject));
  bool is_slice = false;
  while (true) {
    const Token& token = tokens_.current();
    if (token.is_operator(":") || token.is_operator("]")) {
      expr->children.push_back(nullptr);
    } else {
      NIBBLE_ASSIGN_OR_RETURN(ExprPtr part, parse());
      expr->children.push_back(std::move(part));
    }
    if (expr->children.size() == 4 || !tokens_.take_operator(":")) {
      break;
    }
    is_slice = true;
  }
  NIBBLE_RETURN_IF_ERROR(tokens_.expect_operator("]"));
  if (is_slice) {
    expr->kind = ExprKind::kSlice;
    expr->children.resize(4);
  } else if (expr->children[1] == nullptr) {
    return tokens_.error("expected an index between [ and ]");
  }
  return finish(std::move(expr));
}

}  // namespace nibble::jinja
