#include <algorithm>

#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

Result<std::string> string_argument(const Value& value, std::string_view what) {
  return value.is_string()
             ? Result<std::string>(value.as_string())
             : template_error("{}: expected a string, got {}", what, value.type_name());
}

// split and rsplit at white space, at most `limit` times.
std::vector<std::string_view> split_at_space(std::string_view text, int64_t limit, StripSide from) {
  std::vector<std::string_view> parts;
  const bool from_right = from == StripSide::kRight;
  while (true) {
    text = from_right ? strip_right(text) : strip_left(text);
    if (text.empty()) {
      break;
    }
    size_t end = text.size();
    if (limit >= 0 && static_cast<int64_t>(parts.size()) == limit) {
      parts.push_back(text);  // Python keeps the blanks at the far end
      break;
    }
    size_t last_space = std::string_view::npos;
    for (size_t i = 0; i < text.size();) {
      const size_t here = i;
      if (is_space(next_code_point(text, i))) {
        last_space = i;
        if (!from_right) {
          end = here;
          break;
        }
      }
    }
    if (from_right) {
      const size_t begin = last_space == std::string_view::npos ? 0 : last_space;
      parts.push_back(text.substr(begin));
      text = text.substr(0, begin);
    } else {
      parts.push_back(text.substr(0, end));
      text = text.substr(end);
    }
  }
  return parts;
}

std::vector<std::string_view> split_at(std::string_view text,
                                       std::string_view separator,
                                       int64_t limit,
                                       StripSide from) {
  std::vector<std::string_view> parts;
  while (limit < 0 || static_cast<int64_t>(parts.size()) < limit) {
    const size_t place = from == StripSide::kRight ? text.rfind(separator) : text.find(separator);
    if (place == std::string_view::npos) {
      break;
    }
    if (from == StripSide::kRight) {
      parts.push_back(text.substr(place + separator.size()));
      text = text.substr(0, place);
    } else {
      parts.push_back(text.substr(0, place));
      text = text.substr(place + separator.size());
    }
  }
  parts.push_back(text);
  return parts;
}

Result<Value> split_from(Runtime& runtime,
                         const Value& self,
                         const Arguments& args,
                         StripSide from) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"split", {"sep", "maxsplit"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t limit, integer_argument(a[1], -1, "split"));
  const std::string& text = self.as_string();
  std::vector<std::string_view> parts;
  if (a[0].is_undefined() || a[0].is_none()) {
    // Scans the rest of the text once per part when going from the right.
    const uint64_t passes = from == StripSide::kRight ? text.size() / 2 + 1 : 1;
    NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size() * passes));
    parts = split_at_space(text, limit, from);
  } else {
    NIBBLE_ASSIGN_OR_RETURN(const std::string separator, string_argument(a[0], "split"));
    if (separator.empty()) {
      return template_error("empty separator");
    }
    parts = split_at(text, separator, limit, from);
  }
  if (from == StripSide::kRight) {
    std::reverse(parts.begin(), parts.end());
  }
  std::vector<Value> items;
  for (const std::string_view part : parts) {
    NIBBLE_ASSIGN_OR_RETURN(Value item, runtime.string(std::string(part)));
    items.push_back(std::move(item));
  }
  return runtime.list(std::move(items));
}

template <StripSide kFrom>
Result<Value> split(Runtime& runtime, const Value& self, const Arguments& args) {
  return split_from(runtime, self, args, kFrom);
}

template <StripSide kSide>
Result<Value> strip(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"strip", {"chars"}, 0}, args));
  return strip_text(runtime, self.as_string(), a[0], kSide);
}

bool has_affix(std::string_view text, std::string_view affix, StripSide side) {
  return side == StripSide::kLeft ? text.starts_with(affix) : text.ends_with(affix);
}

template <StripSide kSide>
Result<Value> starts_or_ends(Runtime&, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"startswith", {"prefix"}, 1}, args));
  if (a[0].is(Value::Kind::kTuple)) {
    for (const Value& affix : *a[0].items()) {
      NIBBLE_ASSIGN_OR_RETURN(const std::string text, string_argument(affix, "startswith"));
      if (has_affix(self.as_string(), text, kSide)) {
        return Value::boolean(true);
      }
    }
    return Value::boolean(false);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string affix, string_argument(a[0], "startswith"));
  return Value::boolean(has_affix(self.as_string(), affix, kSide));
}

template <StripSide kSide>
Result<Value> remove_affix(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"removeprefix", {"prefix"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string affix, string_argument(a[0], "removeprefix"));
  const std::string& text = self.as_string();
  if (!has_affix(text, affix, kSide)) {
    return self;
  }
  const size_t kept = text.size() - affix.size();
  return runtime.string(text.substr(kSide == StripSide::kLeft ? affix.size() : 0, kept));
}

Result<Value> replace(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"replace", {"old", "new", "count"}, 2}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string old, string_argument(a[0], "replace"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string with, string_argument(a[1], "replace"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t count, integer_argument(a[2], -1, "replace"));
  return replace_text(runtime, self.as_string(), old, with, count);
}

Result<Value> join(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"join", {"iterable"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(a[0], runtime));
  for (const Value& item : items) {
    NIBBLE_RETURN_IF_ERROR(string_argument(item, "join").status());
  }
  return join_values(runtime, items, self.as_string());
}

template <std::string (*kFunction)(std::string_view)>
Result<Value> map_text(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"string method", {}, 0}, args).status());
  return runtime.string(kFunction(self.as_string()));
}

// Letters after anything but a letter are upper, the others lower.
std::string title(std::string_view text) {
  std::string out;
  bool after_letter = false;
  for (size_t i = 0; i < text.size();) {
    const uint32_t c = next_code_point(text, i);
    append_code_point(out, after_letter ? to_lower(c) : to_upper(c));
    after_letter = is_letter(c);
  }
  return out;
}

// All code points satisfy the predicate, and there is one at least.
template <bool (*kPredicate)(uint32_t)>
Result<Value> all_of(Runtime& runtime, const Value& self, const Arguments&) {
  NIBBLE_RETURN_IF_ERROR(runtime.charge(self.as_string().size()));
  const std::vector<uint32_t> points = code_points(self.as_string());
  return Value::boolean(!points.empty() && std::all_of(points.begin(), points.end(), kPredicate));
}

bool is_digit(uint32_t c) { return c >= '0' && c <= '9'; }
bool is_alphanumeric(uint32_t c) { return is_digit(c) || is_letter(c); }

template <uint32_t (*kOther)(uint32_t), uint32_t (*kSame)(uint32_t)>
Result<Value> is_cased(Runtime& runtime, const Value& self, const Arguments&) {
  NIBBLE_RETURN_IF_ERROR(runtime.charge(self.as_string().size()));
  bool has_letter = false;
  for (const uint32_t c : code_points(self.as_string())) {
    if (kSame(c) != c) {
      return Value::boolean(false);
    }
    has_letter = has_letter || kOther(c) != c;
  }
  return Value::boolean(has_letter);
}

// Byte position of a substring; find, rfind and index give the code point's.
template <StripSide kFrom>
Result<Value> find(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"find", {"sub"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string part, string_argument(a[0], "find"));
  const std::string& text = self.as_string();
  NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size()));
  const size_t place = kFrom == StripSide::kRight ? text.rfind(part) : text.find(part);
  return place == std::string::npos ? Value::integer(-1)
                                    : Value::integer(static_cast<Integer>(count_code_points(
                                          std::string_view(text).substr(0, place))));
}

Result<Value> index(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(Value place, find<StripSide::kLeft>(runtime, self, args));
  return place.as_integer() < 0 ? Result<Value>(template_error("substring not found")) : place;
}

Result<Value> count(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"count", {"sub"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string part, string_argument(a[0], "count"));
  const std::string& text = self.as_string();
  NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size()));
  if (part.empty()) {
    return Value::integer(static_cast<Integer>(count_code_points(text) + 1));
  }
  return Value::integer(
      static_cast<Integer>(split_at(text, part, -1, StripSide::kLeft).size() - 1));
}

Result<Value> splitlines(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"splitlines", {}, 0}, args).status());
  std::vector<Value> lines;
  for (const std::string_view line : split_lines(self.as_string())) {
    NIBBLE_ASSIGN_OR_RETURN(Value text, runtime.string(std::string(line)));
    lines.push_back(std::move(text));
  }
  return runtime.list(std::move(lines));
}

template <StripSide kFrom>
Result<Value> partition(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"partition", {"sep"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string separator, string_argument(a[0], "partition"));
  if (separator.empty()) {
    return template_error("empty separator");
  }
  const std::string& text = self.as_string();
  NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size()));
  const bool from_right = kFrom == StripSide::kRight;
  const size_t place = from_right ? text.rfind(separator) : text.find(separator);
  const Value none = Value::string("");
  if (place == std::string::npos) {
    return runtime.tuple(from_right ? std::vector<Value>{none, none, self}
                                    : std::vector<Value>{self, none, none});
  }
  return runtime.tuple({Value::string(text.substr(0, place)), a[0],
                        Value::string(text.substr(place + separator.size()))});
}

// ljust, rjust and center: `kSide` is where the text ends up.
template <StripSide kSide>
Result<Value> justify(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"justify", {"width", "fillchar"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t width, integer_argument(a[0], 0, "justify"));
  const std::string fill = a[1].is_string() ? a[1].as_string() : " ";
  const auto size = static_cast<int64_t>(count_code_points(self.as_string()));
  const auto missing = static_cast<uint64_t>(std::max<int64_t>(0, width - size));
  NIBBLE_RETURN_IF_ERROR(runtime.charge(missing));
  const uint64_t before = kSide == StripSide::kLeft    ? 0
                          : kSide == StripSide::kRight ? missing
                                                       : missing / 2 + (missing & width & 1);
  std::string out;
  for (uint64_t i = 0; i < before; ++i) {
    out += fill;
  }
  out += self.as_string();
  for (uint64_t i = before; i < missing; ++i) {
    out += fill;
  }
  return runtime.string(std::move(out));
}

}  // namespace

Method find_string_method(std::string_view name) {
  constexpr std::pair<std::string_view, Method> kMethods[] = {
      {"split", split<StripSide::kLeft>},
      {"rsplit", split<StripSide::kRight>},
      {"strip", strip<StripSide::kBoth>},
      {"lstrip", strip<StripSide::kLeft>},
      {"rstrip", strip<StripSide::kRight>},
      {"startswith", starts_or_ends<StripSide::kLeft>},
      {"endswith", starts_or_ends<StripSide::kRight>},
      {"removeprefix", remove_affix<StripSide::kLeft>},
      {"removesuffix", remove_affix<StripSide::kRight>},
      {"replace", replace},
      {"join", join},
      {"upper", map_text<upper>},
      {"lower", map_text<lower>},
      {"casefold", map_text<lower>},
      {"title", map_text<title>},
      {"capitalize", map_text<capitalize>},
      {"isspace", all_of<is_space>},
      {"isdigit", all_of<is_digit>},
      {"isnumeric", all_of<is_digit>},
      {"isdecimal", all_of<is_digit>},
      {"isalpha", all_of<is_letter>},
      {"isalnum", all_of<is_alphanumeric>},
      {"isupper", is_cased<to_lower, to_upper>},
      {"islower", is_cased<to_upper, to_lower>},
      {"find", find<StripSide::kLeft>},
      {"rfind", find<StripSide::kRight>},
      {"index", index},
      {"count", count},
      {"splitlines", splitlines},
      {"partition", partition<StripSide::kLeft>},
      {"rpartition", partition<StripSide::kRight>},
      {"ljust", justify<StripSide::kLeft>},
      {"rjust", justify<StripSide::kRight>},
      {"center", justify<StripSide::kBoth>}};
  for (const auto& [method, function] : kMethods) {
    if (method == name) {
      return function;
    }
  }
  return nullptr;
}

}  // namespace nibble::jinja
