#include "text/jinja/filters.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/operators.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {

Result<Value> Interpreter::evaluate(const Expr& expr) {
  const DepthGuard guard(*this);
  NIBBLE_RETURN_IF_ERROR(locate(guard.status(), expr.line));
  Result<Value> value = dispatch(expr);
  return value.ok() ? value : locate(value.status(), expr.line);
}

Result<Value> Interpreter::dispatch(const Expr& expr) {
  switch (expr.kind) {
    case ExprKind::kConstant:
      return expr.constant;
    case ExprKind::kName:
      return evaluate_name(expr);
    case ExprKind::kList:
    case ExprKind::kTuple:
      return evaluate_container(expr);
    case ExprKind::kDict:
      return evaluate_dict(expr);
    case ExprKind::kAttribute:
    case ExprKind::kItem:
    case ExprKind::kSlice:
      return evaluate_access(expr);
    case ExprKind::kCall:
      return evaluate_call(expr);
    case ExprKind::kFilter:
      return evaluate_filter(expr);
    case ExprKind::kTest:
      return evaluate_test(expr);
    case ExprKind::kUnary:
    case ExprKind::kBinary:
      return evaluate_operation(expr);
    case ExprKind::kCompare:
      return evaluate_compare(expr);
    case ExprKind::kConcat:
      return evaluate_concat(expr);
    case ExprKind::kAnd:
    case ExprKind::kOr:
      return evaluate_logic(expr);
    case ExprKind::kConditional:
      return evaluate_conditional(expr);
    case ExprKind::kBlockText:
      break;
  }
  return block_texts_.back();
}

Result<Value> Interpreter::evaluate_name(const Expr& expr) {
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent) {
    const auto found = scope->variables.find(expr.name);
    if (found != scope->variables.end()) {
      return found->second;
    }
  }
  return Value::undefined(fmt::format("'{}' is undefined", expr.name));
}

Result<Value> Interpreter::evaluate_container(const Expr& expr) {
  std::vector<Value> items;
  for (const ExprPtr& child : expr.children) {
    NIBBLE_ASSIGN_OR_RETURN(Value item, evaluate(*child));
    items.push_back(std::move(item));
  }
  return expr.kind == ExprKind::kList ? runtime_.list(std::move(items))
                                      : runtime_.tuple(std::move(items));
}

Result<Value> Interpreter::evaluate_dict(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(Value dict, runtime_.dict());
  for (size_t i = 0; i < expr.children.size(); i += 2) {
    NIBBLE_ASSIGN_OR_RETURN(const Value key, evaluate(*expr.children[i]));
    NIBBLE_ASSIGN_OR_RETURN(Value value, evaluate(*expr.children[i + 1]));
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(kItemWork));
    NIBBLE_RETURN_IF_ERROR(dict.as_dict()->set(key, std::move(value)));
  }
  return dict;
}

Result<Value> Interpreter::evaluate_access(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(const Value object, evaluate(*expr.children[0]));
  if (expr.kind == ExprKind::kAttribute) {
    return get_attribute(object, expr.name, runtime_);
  }
  if (expr.kind == ExprKind::kItem) {
    NIBBLE_ASSIGN_OR_RETURN(const Value index, evaluate(*expr.children[1]));
    return get_item(object, index, runtime_);
  }
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i) {
    if (expr.children[i + 1] != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(bounds[i], evaluate(*expr.children[i + 1]));
    }
  }
  return get_slice(object, {.first = bounds[0], .last = bounds[1], .step = bounds[2]}, runtime_);
}

Result<Value> Interpreter::evaluate_call(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(const Value callee, evaluate(*expr.children[0]));
  NIBBLE_ASSIGN_OR_RETURN(Arguments arguments, evaluate_arguments(expr.arguments));
  return call(callee, arguments);
}

Result<Value> Interpreter::evaluate_filter(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(const Value subject, evaluate(*expr.children[0]));
  NIBBLE_ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(expr.arguments));
  return apply_filter(expr.name, subject, arguments, runtime_);
}

Result<Value> Interpreter::evaluate_test(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(const Value subject, evaluate(*expr.children[0]));
  NIBBLE_ASSIGN_OR_RETURN(const Arguments arguments, evaluate_arguments(expr.arguments));
  NIBBLE_ASSIGN_OR_RETURN(const bool passes, apply_test(expr.name, subject, arguments, runtime_));
  return Value::boolean(passes);
}

Result<Value> Interpreter::evaluate_operation(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(const Value left, evaluate(*expr.children[0]));
  if (expr.kind == ExprKind::kUnary) {
    return apply_unary(expr.operators[0], left);
  }
  NIBBLE_ASSIGN_OR_RETURN(const Value right, evaluate(*expr.children[1]));
  return apply_binary(expr.operators[0], left, right, runtime_);
}

Result<Value> Interpreter::evaluate_compare(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(Value left, evaluate(*expr.children[0]));
  for (size_t i = 0; i < expr.operators.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(Value right, evaluate(*expr.children[i + 1]));
    NIBBLE_ASSIGN_OR_RETURN(const bool holds, compare(expr.operators[i], left, right, runtime_));
    if (!holds) {
      return Value::boolean(false);
    }
    left = std::move(right);
  }
  return Value::boolean(true);
}

Result<Value> Interpreter::evaluate_concat(const Expr& expr) {
  std::string text;
  for (const ExprPtr& child : expr.children) {
    NIBBLE_ASSIGN_OR_RETURN(const Value part, evaluate(*child));
    NIBBLE_ASSIGN_OR_RETURN(const std::string part_text, to_text(part, runtime_));
    text += part_text;
  }
  return runtime_.string(std::move(text));
}

Result<Value> Interpreter::evaluate_logic(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(Value left, evaluate(*expr.children[0]));
  return left.truthy() == (expr.kind == ExprKind::kOr) ? std::move(left)
                                                       : evaluate(*expr.children[1]);
}

Result<Value> Interpreter::evaluate_conditional(const Expr& expr) {
  NIBBLE_ASSIGN_OR_RETURN(const Value condition, evaluate(*expr.children[0]));
  if (condition.truthy()) {
    return evaluate(*expr.children[1]);
  }
  return expr.children[2] != nullptr
             ? evaluate(*expr.children[2])
             : Result<Value>(Value::undefined("an inline if without else was false"));
}

}  // namespace nibble::jinja
