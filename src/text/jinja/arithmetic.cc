#include <cmath>

#include "text/jinja/operators.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

std::string_view symbol(Operator op) {
  switch (op) {
    case Operator::kAdd:
      return "+";
    case Operator::kSubtract:
      return "-";
    case Operator::kMultiply:
      return "*";
    case Operator::kDivide:
      return "/";
    case Operator::kFloorDivide:
      return "//";
    case Operator::kModulo:
      return "%";
    default:
      return "**";
  }
}

Status overflow() { return template_error("an integer grew beyond 128 bits"); }

Result<Value> integer_power(Integer base, Integer exponent) {
  Integer result = 1;
  while (true) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) {
      return overflow();
    }
    exponent >>= 1;
    if (exponent == 0) {
      return Value::integer(result);
    }
    if (__builtin_mul_overflow(base, base, &base)) {
      return overflow();
    }
  }
}

Result<Value> integer_operation(Operator op, Integer a, Integer b) {
  Integer result = 0;
  switch (op) {
    case Operator::kAdd:
      return __builtin_add_overflow(a, b, &result) ? Result<Value>(overflow())
                                                   : Value::integer(result);
    case Operator::kSubtract:
      return __builtin_sub_overflow(a, b, &result) ? Result<Value>(overflow())
                                                   : Value::integer(result);
    case Operator::kMultiply:
      return __builtin_mul_overflow(a, b, &result) ? Result<Value>(overflow())
                                                   : Value::integer(result);
    case Operator::kPower:
      return b < 0 ? Result<Value>(
                         Value::real(std::pow(static_cast<double>(a), static_cast<double>(b))))
                   : integer_power(a, b);
    default:
      break;
  }
  if (b == -1) {  // the one division that can overflow
    return op == Operator::kModulo ? Result<Value>(Value::integer(0))
                                   : integer_operation(Operator::kSubtract, 0, a);
  }
  const Integer quotient = a / b;
  const Integer remainder = a % b;
  const bool rounds_up = remainder != 0 && (remainder < 0) != (b < 0);  // Python rounds down
  return Value::integer(op == Operator::kFloorDivide ? quotient - (rounds_up ? 1 : 0)
                                                     : remainder + (rounds_up ? b : 0));
}

Result<Value> real_operation(Operator op, double a, double b) {
  switch (op) {
    case Operator::kAdd:
      return Value::real(a + b);
    case Operator::kSubtract:
      return Value::real(a - b);
    case Operator::kMultiply:
      return Value::real(a * b);
    case Operator::kDivide:
      return Value::real(a / b);
    case Operator::kFloorDivide:
      return Value::real(std::floor(a / b));
    case Operator::kModulo: {
      const double remainder = std::fmod(a, b);
      return Value::real(remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder);
    }
    default:
      return Value::real(std::pow(a, b));
  }
}

Result<Value> number_operation(Operator op, const Value& left, const Value& right) {
  const bool divides =
      op == Operator::kDivide || op == Operator::kFloorDivide || op == Operator::kModulo;
  if ((divides && right.as_double() == 0) ||
      (op == Operator::kPower && left.as_double() == 0 && right.as_double() < 0)) {
    return template_error("division by zero");
  }
  return left.is_integral() && right.is_integral() && op != Operator::kDivide
             ? integer_operation(op, left.as_integer(), right.as_integer())
             : real_operation(op, left.as_double(), right.as_double());
}

Result<Value> repeat(const Value& value, Integer times, Runtime& runtime) {
  const auto size = static_cast<uint64_t>(value.is_string() ? value.as_string().size()
                                                            : value.items()->size() * kItemWork);
  times = size == 0 || times < 0 ? 0 : times;
  const Integer limit = runtime.limits().work;
  if (times > limit) {
    return template_error("a repetition of {} times is too large", times);
  }
  NIBBLE_RETURN_IF_ERROR(
      runtime.charge(static_cast<uint64_t>(std::min<Integer>(times * Integer{size}, limit + 1))));
  if (value.is_string()) {
    std::string text;
    for (Integer i = 0; i < times; ++i) {
      text += value.as_string();
    }
    return Value::string(std::move(text));
  }
  std::vector<Value> items;
  for (Integer i = 0; i < times; ++i) {
    items.insert(items.end(), value.items()->begin(), value.items()->end());
  }
  return value.is(Value::Kind::kList) ? runtime.list(std::move(items))
                                      : runtime.tuple(std::move(items));
}

Result<Value> add_sequences(const Value& left, const Value& right, Runtime& runtime) {
  NIBBLE_RETURN_IF_ERROR(
      runtime.charge(kItemWork * (left.items()->size() + right.items()->size())));
  std::vector<Value> items = *left.items();
  items.insert(items.end(), right.items()->begin(), right.items()->end());
  return left.is(Value::Kind::kList) ? runtime.list(std::move(items))
                                     : runtime.tuple(std::move(items));
}

bool can_repeat(const Value& value) { return value.is_string() || value.items() != nullptr; }

}  // namespace

Result<Value> apply_binary(Operator op, const Value& left, const Value& right, Runtime& runtime) {
  if (left.is_number() && right.is_number()) {
    return number_operation(op, left, right);
  }
  if (op == Operator::kModulo && left.is_string()) {
    NIBBLE_ASSIGN_OR_RETURN(std::string text, percent_format(left.as_string(), right, runtime));
    return runtime.string(std::move(text));
  }
  if (left.is_undefined() || right.is_undefined()) {
    return Status(StatusCode::kInvalidArgument,
                  left.is_undefined() ? left.why_undefined() : right.why_undefined());
  }
  if (op == Operator::kAdd && left.kind() == right.kind()) {
    if (left.is_string()) {
      NIBBLE_RETURN_IF_ERROR(runtime.charge(left.as_string().size()));
      return runtime.string(left.as_string() + right.as_string());
    }
    if (left.items() != nullptr) {
      return add_sequences(left, right, runtime);
    }
  }
  if (op == Operator::kMultiply && can_repeat(left) && right.is_integral()) {
    return repeat(left, right.as_integer(), runtime);
  }
  if (op == Operator::kMultiply && left.is_integral() && can_repeat(right)) {
    return repeat(right, left.as_integer(), runtime);
  }
  return template_error("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op),
                        left.type_name(), right.type_name());
}

Result<Value> apply_unary(Operator op, const Value& operand) {
  if (op == Operator::kNot) {
    return Value::boolean(!operand.truthy());
  }
  if (operand.is_undefined()) {
    return Status(StatusCode::kInvalidArgument, operand.why_undefined());
  }
  if (!operand.is_number()) {
    return template_error("bad operand type for unary {}: '{}'",
                          op == Operator::kNegate ? "-" : "+", operand.type_name());
  }
  if (op == Operator::kPlus) {
    return operand.is_integral() ? Value::integer(operand.as_integer()) : operand;
  }
  return operand.is_integral() ? integer_operation(Operator::kSubtract, 0, operand.as_integer())
                               : Result<Value>(Value::real(-operand.as_double()));
}

}  // namespace nibble::jinja
