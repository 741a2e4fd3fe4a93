#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "text/jinja/filters.h"
#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

template <std::string (*kFunction)(std::string_view)>
Result<Value> map_text(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"filter", {}, 0}, args).status());
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, to_text(subject, runtime));
  return runtime.string(kFunction(text));
}

std::string same(std::string_view text) { return std::string(text); }

// Words begin at the start and after blanks, dashes and opening brackets.
std::string title(std::string_view text) {
  constexpr std::string_view kStarts = "-({[<";
  std::string out;
  bool is_start = true;
  for (size_t i = 0; i < text.size();) {
    const uint32_t c = next_code_point(text, i);
    append_code_point(out, is_start ? to_upper(c) : to_lower(c));
    is_start =
        is_space(c) || (c < 0x80 && kStarts.find(static_cast<char>(c)) != std::string_view::npos);
  }
  return out;
}

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out.push_back(c);
    }
  }
  return out;
}

Result<Value> trim(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"trim", {"chars"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, to_text(subject, runtime));
  return strip_text(runtime, text, a[0], StripSide::kBoth);
}

Result<Value> replace(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"replace", {"old", "new", "count"}, 2}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, to_text(subject, runtime));
  NIBBLE_ASSIGN_OR_RETURN(const std::string old, to_text(a[0], runtime));
  NIBBLE_ASSIGN_OR_RETURN(const std::string with, to_text(a[1], runtime));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t count, integer_argument(a[2], -1, "replace"));
  return replace_text(runtime, text, old, with, count);
}

Result<std::string> indent_text(Runtime& runtime, const Value& width, int64_t fallback) {
  if (width.is_string()) {
    return width.as_string();
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t count, integer_argument(width, fallback, "indent"));
  const auto blanks = static_cast<size_t>(std::max<int64_t>(0, count));
  NIBBLE_RETURN_IF_ERROR(runtime.charge(blanks));
  return std::string(blanks, ' ');
}

Result<Value> indent(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"indent", {"width", "first", "blank"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string margin, indent_text(runtime, a[0], 4));
  NIBBLE_ASSIGN_OR_RETURN(std::string text, to_text(subject, runtime));
  text.push_back('\n');  // so that a last line end gives a last, empty line
  std::string out = a[1].truthy() ? margin : "";
  bool is_first = true;
  for (const std::string_view line : split_lines(text)) {
    if (!is_first) {
      out.push_back('\n');
      if (a[2].truthy() || !line.empty()) {
        NIBBLE_RETURN_IF_ERROR(runtime.charge(margin.size()));
        out += margin;
      }
    }
    is_first = false;
    out += line;
  }
  return runtime.string(std::move(out));
}

Result<Value> tojson(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(
      const auto a,
      bind({"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, 0}, args));
  JsonStyle style{.escapes_non_ascii = a[0].truthy(), .sorts_keys = a[3].truthy()};
  if (!a[1].is_undefined() && !a[1].is_none()) {
    NIBBLE_ASSIGN_OR_RETURN(style.indent, indent_text(runtime, a[1], 0));
    style.item_separator = ",";
  }
  if (const std::vector<Value>* pair = a[2].items(); pair != nullptr) {
    if (pair->size() != 2 || !(*pair)[0].is_string() || !(*pair)[1].is_string()) {
      return template_error("tojson: separators must be two strings");
    }
    style.item_separator = (*pair)[0].as_string();
    style.key_separator = (*pair)[1].as_string();
  }
  NIBBLE_ASSIGN_OR_RETURN(std::string text, to_json(subject, style, runtime));
  return runtime.string(std::move(text));
}

Result<Value> format(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string pattern, to_text(subject, runtime));
  NIBBLE_ASSIGN_OR_RETURN(Value values, runtime.tuple(args.positional));
  if (!args.named.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(values, runtime.dict());
    for (const auto& [name, value] : args.named) {
      values.as_dict()->set(name, value);
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(std::string text, percent_format(pattern, values, runtime));
  return runtime.string(std::move(text));
}

Result<Value> center(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"center", {"width"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(std::string text, to_text(subject, runtime));
  const Value width = a[0].is_undefined() ? Value::integer(80) : a[0];
  return find_string_method("center")(runtime, Value::string(std::move(text)), {{width}, {}});
}

// Python's float(text), nullopt if the text is no number.
std::optional<double> parse_number(const std::string& text) {
  const std::string trimmed(strip_left(strip_right(text)));
  if (trimmed.empty() || trimmed.find_first_of("xX") != std::string::npos) {
    return std::nullopt;
  }
  char* end = nullptr;
  const double number = std::strtod(trimmed.c_str(), &end);
  return end == trimmed.c_str() + trimmed.size() ? std::optional<double>(number) : std::nullopt;
}

std::optional<double> number_of(const Value& value) {
  if (value.is_number()) {
    return value.as_double();
  }
  return value.is_string() ? parse_number(value.as_string()) : std::nullopt;
}

std::optional<Integer> parse_integer(const std::string& text, int base) {
  std::string trimmed(strip_left(strip_right(text)));
  const bool is_negative = trimmed.starts_with('-');
  trimmed.erase(0, is_negative || trimmed.starts_with('+') ? 1 : 0);
  const bool has_prefix = base == 16 && (trimmed.starts_with("0x") || trimmed.starts_with("0X"));
  trimmed.erase(0, has_prefix ? 2 : 0);
  Integer value = 0;
  for (const char c : trimmed) {
    const int digit = c >= '0' && c <= '9'                     ? c - '0'
                      : (c | 0x20) >= 'a' && (c | 0x20) <= 'z' ? (c | 0x20) - 'a' + 10
                                                               : base;
    if (digit >= base || __builtin_mul_overflow(value, Integer{base}, &value) ||
        __builtin_add_overflow(value, Integer{digit}, &value)) {
      return std::nullopt;
    }
  }
  return trimmed.empty() ? std::nullopt : std::optional<Integer>(is_negative ? -value : value);
}

Result<Value> to_int(Runtime&, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"int", {"default", "base"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t base, integer_argument(a[1], 10, "int"));
  if (base < 2 || base > 36) {
    return template_error("int: base must be from 2 to 36");
  }
  if (subject.is_integral()) {
    return Value::integer(subject.as_integer());
  }
  if (subject.is_string()) {
    const auto exact = parse_integer(subject.as_string(), static_cast<int>(base));
    if (exact.has_value()) {
      return Value::integer(*exact);
    }
  }
  const std::optional<double> number = number_of(subject);
  if (number.has_value() && std::fabs(*number) < 1e38) {  // false for NaN and infinity
    return Value::integer(static_cast<Integer>(*number));
  }
  return a[0].is_undefined() ? Value::integer(0) : a[0];
}

Result<Value> to_float(Runtime&, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"float", {"default"}, 0}, args));
  const std::optional<double> number = number_of(subject);
  const Value fallback = a[0].is_undefined() ? Value::real(0) : a[0];
  return number.has_value() ? Value::real(*number) : fallback;
}

Result<Value> absolute(Runtime&, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"abs", {}, 0}, args).status());
  if (!subject.is_number()) {
    return template_error("abs: expected a number, got {}", subject.type_name());
  }
  return subject.as_double() < 0 ? apply_unary(Operator::kNegate, subject)
                                 : apply_unary(Operator::kPlus, subject);
}

Result<Value> round(Runtime&, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"round", {"precision", "method"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t precision, integer_argument(a[0], 0, "round"));
  const std::string method = a[1].is_string() ? a[1].as_string() : "common";
  if (!subject.is_number()) {
    return template_error("round: expected a number, got {}", subject.type_name());
  }
  if (std::abs(precision) > 300) {
    return template_error("round: precision {} is out of range", precision);
  }
  const double number = subject.as_double();
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (method == "ceil" || method == "floor") {
    const double scaled = number * scale;
    return Value::real((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
  }
  if (method != "common") {
    return template_error("round: method must be common, ceil or floor, not {}", method);
  }
  if (subject.is_integral() && precision >= 0) {
    return Value::integer(subject.as_integer());
  }
  if (precision < 0) {
    const double rounded = std::nearbyint(number * scale) / scale;
    return subject.is_integral() ? Value::integer(static_cast<Integer>(rounded))
                                 : Value::real(rounded);
  }
  // Decimal text is rounded exactly, ties to even, as Python's round does.
  return Value::real(std::strtod(fmt::format("{:.{}f}", number, precision).c_str(), nullptr));
}

Result<Value> wordcount(Runtime& runtime, const Value& subject, const Arguments&) {
  NIBBLE_ASSIGN_OR_RETURN(std::string text, to_text(subject, runtime));
  NIBBLE_ASSIGN_OR_RETURN(const Value words,
                          find_string_method("split")(runtime, Value::string(std::move(text)), {}));
  return Value::integer(static_cast<Integer>(words.items()->size()));
}

}  // namespace

Filter find_text_filter(std::string_view name) {
  constexpr std::pair<std::string_view, Filter> kFilters[] = {{"string", map_text<same>},
                                                              {"safe", map_text<same>},
                                                              {"upper", map_text<upper>},
                                                              {"lower", map_text<lower>},
                                                              {"title", map_text<title>},
                                                              {"capitalize", map_text<capitalize>},
                                                              {"escape", map_text<escape>},
                                                              {"e", map_text<escape>},
                                                              {"trim", trim},
                                                              {"replace", replace},
                                                              {"indent", indent},
                                                              {"tojson", tojson},
                                                              {"format", format},
                                                              {"center", center},
                                                              {"int", to_int},
                                                              {"float", to_float},
                                                              {"abs", absolute},
                                                              {"round", round},
                                                              {"wordcount", wordcount}};
  for (const auto& [filter, function] : kFilters) {
    if (filter == name) {
      return function;
    }
  }
  return nullptr;
}

}  // namespace nibble::jinja
