#include <fmt/printf.h>

#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

constexpr int kMaxWidth = 10000;

// One conversion such as %-5.2f.
struct Conversion {
  std::string flags;
  int width = 0;
  int precision = -1;
  char type = 's';
};

class Formatter final {
 public:
  Formatter(const std::string& format, const Value& arguments, Runtime& runtime)
      : format_(format), arguments_(arguments), runtime_(runtime) {}

  Result<std::string> run() {
    for (position_ = 0; position_ < format_.size();) {
      const char c = format_[position_++];
      if (c != '%') {
        out_.push_back(c);
      } else if (position_ < format_.size() && format_[position_] == '%') {
        out_.push_back('%');
        ++position_;
      } else {
        NIBBLE_RETURN_IF_ERROR(convert());
      }
    }
    const bool is_tuple = arguments_.is(Value::Kind::kTuple);
    const size_t given = is_tuple ? arguments_.items()->size() : 1;
    if (!arguments_.is(Value::Kind::kDict) && used_ < given) {
      return template_error("not all arguments converted during string formatting");
    }
    return std::move(out_);
  }

 private:
  Result<Value> next_argument() {
    if (!arguments_.is(Value::Kind::kTuple)) {
      return used_++ == 0 ? Result<Value>(arguments_)
                          : template_error("not enough arguments for format string");
    }
    if (used_ >= arguments_.items()->size()) {
      return template_error("not enough arguments for format string");
    }
    return (*arguments_.items())[used_++];
  }

  Result<Value> named_argument() {
    const size_t end = format_.find(')', position_);
    if (end == std::string::npos || !arguments_.is(Value::Kind::kDict)) {
      return template_error("format requires a mapping");
    }
    const std::string name = format_.substr(position_ + 1, end - position_ - 1);
    const Value* found = arguments_.as_dict()->find(name);
    if (found == nullptr) {
      return template_error("format misses the key '{}'", name);
    }
    position_ = end + 1;
    return *found;
  }

  int number() {
    int value = 0;
    while (position_ < format_.size() && format_[position_] >= '0' && format_[position_] <= '9') {
      value = std::min(kMaxWidth, value * 10 + (format_[position_++] - '0'));
    }
    return value;
  }

  Status convert() {
    std::optional<Value> argument;
    if (position_ < format_.size() && format_[position_] == '(') {
      NIBBLE_ASSIGN_OR_RETURN(argument, named_argument());
    }
    Conversion conversion;
    constexpr std::string_view kFlags = "-+ 0#";
    while (position_ < format_.size() &&
           kFlags.find(format_[position_]) != std::string_view::npos) {
      conversion.flags.push_back(format_[position_++]);
    }
    conversion.width = number();
    if (position_ < format_.size() && format_[position_] == '.') {
      ++position_;
      conversion.precision = number();
    }
    if (position_ >= format_.size()) {
      return template_error("incomplete format");
    }
    conversion.type = format_[position_++];
    if (!argument.has_value()) {
      NIBBLE_ASSIGN_OR_RETURN(argument, next_argument());
    }
    return append(conversion, *argument);
  }

  Status append(const Conversion& conversion, const Value& value) {
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(static_cast<uint64_t>(conversion.width) + kNodeWork));
    const bool is_text = conversion.type == 's' || conversion.type == 'r';
    if (is_text) {
      NIBBLE_ASSIGN_OR_RETURN(std::string text, conversion.type == 's' ? to_text(value, runtime_)
                                                                       : to_repr(value, runtime_));
      if (conversion.precision >= 0) {
        text.resize(byte_offset(text, static_cast<size_t>(conversion.precision)));
      }
      const auto width = static_cast<size_t>(conversion.width);
      const size_t length = count_code_points(text);
      const std::string padding(width > length ? width - length : 0, ' ');
      out_ += conversion.flags.find('-') == std::string::npos ? padding + text : text + padding;
      return {};
    }
    if (!value.is_number()) {
      return template_error("%{} format: a number is required, not {}", conversion.type,
                            value.type_name());
    }
    std::string spec = "%" + conversion.flags + std::to_string(conversion.width);
    if (conversion.width == 0) {
      spec.pop_back();
    }
    if (conversion.precision >= 0) {
      spec += "." + std::to_string(std::min(conversion.precision, 100));
    }
    constexpr std::string_view kInteger = "dixXo";
    constexpr std::string_view kReal = "feEgG";
    if (kInteger.find(conversion.type) != std::string_view::npos) {
      if (!value.is_integral() && std::abs(value.as_double()) >= 9e18) {
        return template_error("%{} format: the number is too large", conversion.type);
      }
      const auto integer = value.is_integral() ? static_cast<long long>(value.as_integer())
                                               : static_cast<long long>(value.as_double());
      out_ += fmt::sprintf(spec + (conversion.type == 'i' ? 'd' : conversion.type), integer);
      return {};
    }
    if (kReal.find(conversion.type) != std::string_view::npos) {
      out_ += fmt::sprintf(spec + conversion.type, value.as_double());
      return {};
    }
    return template_error("unsupported format character '{}'", conversion.type);
  }

  const std::string& format_;
  const Value& arguments_;
  Runtime& runtime_;
  size_t position_ = 0;
  size_t used_ = 0;
  std::string out_;
};

}  // namespace

Result<std::string> percent_format(const std::string& format,
                                   const Value& arguments,
                                   Runtime& runtime) {
  return Formatter(format, arguments, runtime).run();
}

}  // namespace nibble::jinja
