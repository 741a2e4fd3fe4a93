#include "text/jinja/operators.h"

#include <cmath>

#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

constexpr int kMaxDepth = 300;

Status too_deep() {
  return template_error("a value is nested too deeply to be compared (does it contain itself?)");
}

Result<bool> equal_at(const Value& left, const Value& right, Runtime& runtime, int depth);

Result<bool> equal_items(const std::vector<Value>& left,
                         const std::vector<Value>& right,
                         Runtime& runtime,
                         int depth) {
  if (left.size() != right.size()) {
    return false;
  }
  for (size_t i = 0; i < left.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal_at(left[i], right[i], runtime, depth + 1));
    if (!same) {
      return false;
    }
  }
  return true;
}

Result<bool> equal_dicts(const Dict& left, const Dict& right, Runtime& runtime, int depth) {
  if (left.size() != right.size()) {
    return false;
  }
  for (const Dict::Member& member : left.members()) {
    NIBBLE_ASSIGN_OR_RETURN(const Value* other, right.find(member.key));
    if (other == nullptr) {
      return false;
    }
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal_at(member.value, *other, runtime, depth + 1));
    if (!same) {
      return false;
    }
  }
  return true;
}

Result<bool> equal_at(const Value& left, const Value& right, Runtime& runtime, int depth) {
  if (depth > kMaxDepth) {
    return too_deep();
  }
  NIBBLE_RETURN_IF_ERROR(runtime.charge(kNodeWork / 4));
  if (left.is_integral() && right.is_integral()) {
    return left.as_integer() == right.as_integer();
  }
  if (left.is_number() && right.is_number()) {
    return left.as_double() == right.as_double();
  }
  if (left.kind() != right.kind()) {
    return false;
  }
  switch (left.kind()) {
    case Value::Kind::kUndefined:
    case Value::Kind::kNone:
      return true;
    case Value::Kind::kString:
      NIBBLE_RETURN_IF_ERROR(
          runtime.charge(std::min(left.as_string().size(), right.as_string().size()) / 8));
      return left.as_string() == right.as_string();
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return left.same_as(right) ? Result<bool>(true)
                                 : equal_items(*left.items(), *right.items(), runtime, depth);
    case Value::Kind::kDict:
      return left.same_as(right) ? Result<bool>(true)
                                 : equal_dicts(*left.as_dict(), *right.as_dict(), runtime, depth);
    default:
      return left.same_as(right);
  }
}

// Negative, zero or positive like left - right; unordered (NaN) gives kUnordered.
constexpr int kUnordered = 2;

Result<int> order_at(const Value& left, const Value& right, Runtime& runtime, int depth) {
  if (depth > kMaxDepth) {
    return too_deep();
  }
  NIBBLE_RETURN_IF_ERROR(runtime.charge(kNodeWork / 4));
  if (left.is_undefined() || right.is_undefined()) {
    return Status(StatusCode::kInvalidArgument,
                  left.is_undefined() ? left.why_undefined() : right.why_undefined());
  }
  if (left.is_integral() && right.is_integral()) {
    return left.as_integer() < right.as_integer() ? -1 : left.as_integer() > right.as_integer();
  }
  if (left.is_number() && right.is_number()) {
    const double a = left.as_double();
    const double b = right.as_double();
    return std::isnan(a) || std::isnan(b) ? kUnordered : a < b ? -1 : static_cast<int>(a > b);
  }
  if (left.is_string() && right.is_string()) {
    const int order = left.as_string().compare(right.as_string());  // code point order in UTF-8
    return order < 0 ? -1 : static_cast<int>(order > 0);
  }
  if (left.kind() != right.kind() || left.items() == nullptr) {
    return template_error("'<' not supported between instances of '{}' and '{}'", left.type_name(),
                          right.type_name());
  }
  const std::vector<Value>& a = *left.items();
  const std::vector<Value>& b = *right.items();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal_at(a[i], b[i], runtime, depth + 1));
    if (!same) {
      return order_at(a[i], b[i], runtime, depth + 1);
    }
  }
  return a.size() < b.size() ? -1 : static_cast<int>(a.size() > b.size());
}

}  // namespace

Result<bool> equal(const Value& left, const Value& right, Runtime& runtime) {
  return equal_at(left, right, runtime, 0);
}

Result<bool> less(const Value& left, const Value& right, Runtime& runtime) {
  NIBBLE_ASSIGN_OR_RETURN(const int order, order_at(left, right, runtime, 0));
  return order == -1;
}

Result<bool> contains(const Value& container, const Value& item, Runtime& runtime) {
  if (container.is_string()) {
    if (!item.is_string()) {
      return template_error("'in <string>' requires string as left operand, not {}",
                            item.type_name());
    }
    NIBBLE_RETURN_IF_ERROR(runtime.charge(container.as_string().size()));
    return container.as_string().find(item.as_string()) != std::string::npos;
  }
  if (container.is(Value::Kind::kDict)) {
    NIBBLE_ASSIGN_OR_RETURN(const Value* found, container.as_dict()->find(item));
    return found != nullptr;
  }
  if (container.is_undefined()) {
    return false;
  }
  const std::vector<Value>* items = container.items();
  if (items == nullptr) {
    return template_error("argument of type '{}' is not iterable", container.type_name());
  }
  for (const Value& candidate : *items) {
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal(candidate, item, runtime));
    if (same) {
      return true;
    }
  }
  return false;
}

Result<bool> compare(Operator op, const Value& left, const Value& right, Runtime& runtime) {
  if (op == Operator::kIn || op == Operator::kNotIn) {
    NIBBLE_ASSIGN_OR_RETURN(const bool found, contains(right, left, runtime));
    return found == (op == Operator::kIn);
  }
  if (op == Operator::kEqual || op == Operator::kNotEqual) {
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal(left, right, runtime));
    return same == (op == Operator::kEqual);
  }
  NIBBLE_ASSIGN_OR_RETURN(const int order, order_at(left, right, runtime, 0));
  if (order == kUnordered) {
    return false;
  }
  switch (op) {
    case Operator::kLess:
      return order < 0;
    case Operator::kLessEqual:
      return order <= 0;
    case Operator::kGreater:
      return order > 0;
    default:
      return order >= 0;
  }
}

}  // namespace nibble::jinja
