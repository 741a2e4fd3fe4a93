#include "text/jinja/value_text.h"

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "text/jinja/utf8.h"

namespace nibble::jinja {
namespace {

constexpr int kMaxDepth = 300;

Status too_deep() {
  return template_error("a value is nested too deeply to be printed (does it contain itself?)");
}

void append_string_repr(std::string& out, const std::string& text) {
  const bool has_single = text.find('\'') != std::string::npos;
  const char quote = has_single && text.find('"') == std::string::npos ? '"' : '\'';
  out.push_back(quote);
  for (size_t i = 0; i < text.size();) {
    const uint32_t c = next_code_point(text, i);
    if (c == static_cast<uint32_t>(quote) || c == '\\') {
      out.push_back('\\');
      out.push_back(static_cast<char>(c));
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      append_code_point(out, c);
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", c);
    } else if (c < 0x10000) {
      out += fmt::format("\\u{:04x}", c);
    } else {
      out += fmt::format("\\U{:08x}", c);
    }
  }
  out.push_back(quote);
}

class ReprWriter final {
 public:
  explicit ReprWriter(Runtime& runtime) : runtime_(runtime) {}

  Status write(const Value& value, int depth) {
    if (depth > kMaxDepth) {
      return too_deep();
    }
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(kNodeWork));
    switch (value.kind()) {
      case Value::Kind::kUndefined:
        out += "Undefined";
        break;
      case Value::Kind::kNone:
        out += "None";
        break;
      case Value::Kind::kBool:
        out += value.as_bool() ? "True" : "False";
        break;
      case Value::Kind::kInt:
        out += fmt::format("{}", value.as_integer());
        break;
      case Value::Kind::kFloat:
        out += format_double(value.as_double());
        break;
      case Value::Kind::kString:
        NIBBLE_RETURN_IF_ERROR(runtime_.charge(value.as_string().size()));
        append_string_repr(out, value.as_string());
        break;
      case Value::Kind::kList:
      case Value::Kind::kTuple:
        return write_items(value, depth);
      case Value::Kind::kDict:
        return write_dict(*value.as_dict(), depth);
      case Value::Kind::kNamespace:
        out += "<Namespace ";
        NIBBLE_RETURN_IF_ERROR(write_dict(*value.as_namespace()->members, depth + 1));
        out += ">";
        break;
      case Value::Kind::kLoop:
        out += fmt::format("<LoopContext {}/{}>", value.as_loop()->index + 1,
                           value.as_loop()->items.size());
        break;
      case Value::Kind::kCallable:
        out += fmt::format("<function {}>", value.as_callable()->name);
        break;
    }
    return {};
  }

  std::string out;

 private:
  Status write_items(const Value& value, int depth) {
    const bool is_list = value.is(Value::Kind::kList);
    const std::vector<Value>& items = *value.items();
    out += is_list ? "[" : "(";
    for (size_t i = 0; i < items.size(); ++i) {
      out += i == 0 ? "" : ", ";
      NIBBLE_RETURN_IF_ERROR(write(items[i], depth + 1));
    }
    out += is_list ? "]" : items.size() == 1 ? ",)" : ")";
    return {};
  }

  Status write_dict(const Dict& dict, int depth) {
    out += "{";
    bool is_first = true;
    for (const Dict::Member& member : dict.members()) {
      out += is_first ? "" : ", ";
      is_first = false;
      NIBBLE_RETURN_IF_ERROR(write(member.key, depth + 1));
      out += ": ";
      NIBBLE_RETURN_IF_ERROR(write(member.value, depth + 1));
    }
    out += "}";
    return {};
  }

  Runtime& runtime_;
};

std::string json_number(double number) {
  if (std::isnan(number)) {
    return "NaN";
  }
  if (std::isinf(number)) {
    return number > 0 ? "Infinity" : "-Infinity";
  }
  return format_double(number);
}

class JsonWriter final {
 public:
  JsonWriter(const JsonStyle& style, Runtime& runtime) : style_(style), runtime_(runtime) {}

  Status write(const Value& value, int depth) {
    if (depth > kMaxDepth) {
      return too_deep();
    }
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(kNodeWork));
    switch (value.kind()) {
      case Value::Kind::kNone:
        out += "null";
        return {};
      case Value::Kind::kBool:
        out += value.as_bool() ? "true" : "false";
        return {};
      case Value::Kind::kInt:
        out += fmt::format("{}", value.as_integer());
        return {};
      case Value::Kind::kFloat:
        out += json_number(value.as_double());
        return {};
      case Value::Kind::kString:
        return write_string(value.as_string());
      case Value::Kind::kList:
      case Value::Kind::kTuple:
        return write_items(*value.items(), depth);
      case Value::Kind::kDict:
        return write_dict(*value.as_dict(), depth);
      default:
        return template_error("tojson: a value of type {} has no JSON form", value.type_name());
    }
  }

  std::string out;

 private:
  Status break_line(int depth) {
    if (style_.indent.has_value()) {
      const auto levels = static_cast<uint64_t>(depth);
      NIBBLE_RETURN_IF_ERROR(runtime_.charge(levels * style_.indent->size()));
      out.push_back('\n');
      for (int i = 0; i < depth; ++i) {
        out += *style_.indent;
      }
    }
    return {};
  }

  Status write_string(const std::string& text) {
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(text.size()));
    if (!style_.escapes_non_ascii) {
      append_json_string(out, text);
      return {};
    }
    std::string quoted;
    append_json_string(quoted, text);
    for (size_t i = 0; i < quoted.size();) {
      const uint32_t c = next_code_point(quoted, i);
      if (c < 0x7f) {
        out.push_back(static_cast<char>(c));
      } else if (c < 0x10000) {
        out += fmt::format("\\u{:04x}", c);
      } else {
        out += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + ((c - 0x10000) >> 10),
                           0xdc00 + ((c - 0x10000) & 0x3ff));
      }
    }
    return {};
  }

  Status write_items(const std::vector<Value>& items, int depth) {
    out += "[";
    for (size_t i = 0; i < items.size(); ++i) {
      out += i == 0 ? "" : style_.item_separator;
      NIBBLE_RETURN_IF_ERROR(break_line(depth + 1));
      NIBBLE_RETURN_IF_ERROR(write(items[i], depth + 1));
    }
    NIBBLE_RETURN_IF_ERROR(items.empty() ? Status() : break_line(depth));
    out += "]";
    return {};
  }

  static Result<std::string> key_of(const Value& key) {
    switch (key.kind()) {
      case Value::Kind::kString:
        return key.as_string();
      case Value::Kind::kNone:
        return std::string("null");
      case Value::Kind::kBool:
        return std::string(key.as_bool() ? "true" : "false");
      case Value::Kind::kInt:
        return fmt::format("{}", key.as_integer());
      case Value::Kind::kFloat:
        return json_number(key.as_double());
      default:
        return template_error("tojson: a key of type {} has no JSON form", key.type_name());
    }
  }

  Status write_dict(const Dict& dict, int depth) {
    std::vector<std::pair<std::string, const Value*>> members;
    for (const Dict::Member& member : dict.members()) {
      NIBBLE_ASSIGN_OR_RETURN(std::string key, key_of(member.key));
      members.emplace_back(std::move(key), &member.value);
    }
    if (style_.sorts_keys) {
      std::sort(members.begin(), members.end());
    }
    out += "{";
    bool is_first = true;
    for (const auto& [key, value] : members) {
      out += is_first ? "" : style_.item_separator;
      is_first = false;
      NIBBLE_RETURN_IF_ERROR(break_line(depth + 1));
      NIBBLE_RETURN_IF_ERROR(write_string(key));
      out += style_.key_separator;
      NIBBLE_RETURN_IF_ERROR(write(*value, depth + 1));
    }
    NIBBLE_RETURN_IF_ERROR(members.empty() ? Status() : break_line(depth));
    out += "}";
    return {};
  }

  const JsonStyle& style_;
  Runtime& runtime_;
};

}  // namespace

Result<std::string> to_repr(const Value& value, Runtime& runtime) {
  ReprWriter writer(runtime);
  NIBBLE_RETURN_IF_ERROR(writer.write(value, 0));
  return std::move(writer.out);
}

Result<std::string> to_text(const Value& value, Runtime& runtime) {
  if (value.is_string()) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(value.as_string().size()));
    return value.as_string();
  }
  return value.is_undefined() ? std::string() : to_repr(value, runtime);
}

Result<std::string> to_json(const Value& value, const JsonStyle& style, Runtime& runtime) {
  JsonWriter writer(style, runtime);
  NIBBLE_RETURN_IF_ERROR(writer.write(value, 0));
  return std::move(writer.out);
}

}  // namespace nibble::jinja
