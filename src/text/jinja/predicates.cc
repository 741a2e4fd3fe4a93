#include "text/jinja/filters.h"
#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

using Kind = Value::Kind;
using Predicate = bool (*)(const Value& value);

constexpr std::pair<std::string_view, Predicate> kPredicates[] = {
    {"defined", [](const Value& v) { return !v.is_undefined(); }},
    {"undefined", [](const Value& v) { return v.is_undefined(); }},
    {"none", [](const Value& v) { return v.is_none(); }},
    {"boolean", [](const Value& v) { return v.is(Kind::kBool); }},
    {"true", [](const Value& v) { return v.is(Kind::kBool) && v.as_bool(); }},
    {"false", [](const Value& v) { return v.is(Kind::kBool) && !v.as_bool(); }},
    {"integer", [](const Value& v) { return v.is(Kind::kInt); }},
    {"float", [](const Value& v) { return v.is(Kind::kFloat); }},
    {"number", [](const Value& v) { return v.is_number(); }},
    {"string", [](const Value& v) { return v.is_string(); }},
    {"mapping", [](const Value& v) { return v.is(Kind::kDict); }},
    {"iterable",
     [](const Value& v) {
       return v.is_undefined() || v.is_string() || v.items() != nullptr || v.is(Kind::kDict) ||
              v.is(Kind::kLoop);
     }},
    {"sequence",
     [](const Value& v) {
       return v.is_undefined() || v.is_string() || v.items() != nullptr || v.is(Kind::kDict);
     }},
    // An undefined value has a __call__ that fails, so Python counts it as callable.
    {"callable", [](const Value& v) { return v.is(Kind::kCallable) || v.is_undefined(); }},
    {"escaped", [](const Value&) { return false; }}};

constexpr std::pair<std::string_view, Operator> kComparisons[] = {
    {"eq", Operator::kEqual},        {"equalto", Operator::kEqual},
    {"==", Operator::kEqual},        {"ne", Operator::kNotEqual},
    {"!=", Operator::kNotEqual},     {"lt", Operator::kLess},
    {"lessthan", Operator::kLess},   {"<", Operator::kLess},
    {"le", Operator::kLessEqual},    {"<=", Operator::kLessEqual},
    {"gt", Operator::kGreater},      {"greaterthan", Operator::kGreater},
    {">", Operator::kGreater},       {"ge", Operator::kGreaterEqual},
    {">=", Operator::kGreaterEqual}, {"in", Operator::kIn}};

Result<bool> divides(const Value& value, const Value& divisor, Runtime& runtime) {
  NIBBLE_ASSIGN_OR_RETURN(const Value rest,
                          apply_binary(Operator::kModulo, value, divisor, runtime));
  return rest.is_number() && rest.as_double() == 0;
}

// upper and lower: there is a letter, and no letter of the other case.
Result<bool> has_case(const Value& value, std::string_view name, Runtime& runtime) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, to_text(value, runtime));
  const bool wants_upper = name == "upper";
  return text == (wants_upper ? upper(text) : lower(text)) &&
         text != (wants_upper ? lower(text) : upper(text));
}

}  // namespace

Result<bool> apply_test(std::string_view name,
                        const Value& subject,
                        const Arguments& args,
                        Runtime& runtime) {
  for (const auto& [test, predicate] : kPredicates) {
    if (test == name) {
      NIBBLE_RETURN_IF_ERROR(bind({name, {}, 0}, args).status());
      return predicate(subject);
    }
  }
  for (const auto& [test, op] : kComparisons) {
    if (test == name) {
      NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({name, {"other"}, 1}, args));
      return compare(op, subject, a[0], runtime);
    }
  }
  if (name == "odd" || name == "even") {
    NIBBLE_ASSIGN_OR_RETURN(const bool is_even, divides(subject, Value::integer(2), runtime));
    return is_even == (name == "even");
  }
  if (name == "divisibleby") {
    NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({name, {"num"}, 1}, args));
    return divides(subject, a[0], runtime);
  }
  if (name == "sameas") {
    NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({name, {"other"}, 1}, args));
    return subject.same_as(a[0]);
  }
  if (name == "upper" || name == "lower") {
    return has_case(subject, name, runtime);
  }
  if (name == "filter") {
    NIBBLE_ASSIGN_OR_RETURN(const std::string filter, to_text(subject, runtime));
    return find_text_filter(filter) != nullptr || find_sequence_filter(filter) != nullptr ||
           find_selection_filter(filter) != nullptr;
  }
  return template_error("no test named '{}'", name);
}

}  // namespace nibble::jinja
