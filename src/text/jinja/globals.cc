#include "text/jinja/globals.h"

#include <ctime>

#include "text/jinja/operators.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

Result<Value> range(Runtime& runtime, Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"range", {"start", "stop", "step"}, 1}, args));
  for (size_t i = 0; i < args.positional.size(); ++i) {
    if (!a[i].is_integral()) {
      return template_error("range: expected an integer, got {}", a[i].type_name());
    }
  }
  const bool has_stop = args.positional.size() > 1;
  const Integer start = has_stop ? a[0].as_integer() : 0;
  const Integer stop = (has_stop ? a[1] : a[0]).as_integer();
  const Integer step = args.positional.size() > 2 ? a[2].as_integer() : 1;
  if (step == 0) {
    return template_error("range() arg 3 must not be zero");
  }
  constexpr Integer kBound = Integer{1} << 64;
  for (const Integer bound : {start, stop, step}) {
    if (bound > kBound || bound < -kBound) {
      return template_error("range: {} is too large", bound);
    }
  }
  const Integer distance = step > 0 ? stop - start : start - stop;
  const Integer stride = step > 0 ? step : -step;
  const Integer count = distance <= 0 ? 0 : (distance + stride - 1) / stride;
  constexpr Integer kMaxRange = 100000;  // the bound of Jinja2's sandbox
  if (count > kMaxRange) {
    return template_error("range is too big: {} items, at most {} are allowed", count, kMaxRange);
  }
  std::vector<Value> items;
  for (Integer i = 0; i < count; ++i) {
    items.push_back(Value::integer(start + i * step));
  }
  return runtime.list(std::move(items));
}

// dict(mapping or pairs, name=value, ...), also what fills a namespace.
Status fill(Dict& dict, const Arguments& args, Runtime& runtime) {
  if (args.positional.size() > 1) {
    return template_error("dict expected at most 1 argument, got {}", args.positional.size());
  }
  if (!args.positional.empty()) {
    const Value& source = args.positional[0];
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> entries, iterate(source, runtime));
    for (const Value& entry : entries) {
      if (source.is(Value::Kind::kDict)) {
        NIBBLE_ASSIGN_OR_RETURN(const Value* value, source.as_dict()->find(entry));
        NIBBLE_RETURN_IF_ERROR(dict.set(entry, *value));
        continue;
      }
      const std::vector<Value>* pair = entry.items();
      if (pair == nullptr || pair->size() != 2) {
        return template_error("dict: expected pairs of key and value");
      }
      NIBBLE_RETURN_IF_ERROR(dict.set((*pair)[0], (*pair)[1]));
    }
  }
  for (const auto& [name, value] : args.named) {
    dict.set(name, value);
  }
  return {};
}

Result<Value> make_dict(Runtime& runtime, Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(Value dict, runtime.dict());
  NIBBLE_RETURN_IF_ERROR(fill(*dict.as_dict(), args, runtime));
  return dict;
}

Result<Value> make_namespace(Runtime& runtime, Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(Value space, runtime.space());
  NIBBLE_RETURN_IF_ERROR(fill(*space.as_namespace()->members, args, runtime));
  return space;
}

// The template refuses: its message is the error, unchanged.
Result<Value> raise_exception(Runtime& runtime, Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"raise_exception", {"message"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(std::string message, to_text(a[0], runtime));
  runtime.is_refused = true;
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

Result<Value> strftime_now(Runtime& runtime, Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"strftime_now", {"format"}, 1}, args));
  if (!a[0].is_string() || a[0].as_string().size() > 200) {
    return template_error("strftime_now: expected a format of at most 200 bytes");
  }
  std::string format;
  const std::string& given = a[0].as_string();
  for (size_t i = 0; i < given.size(); ++i) {
    const bool is_zone = given[i] == '%' && i + 1 < given.size() &&
                         (given[i + 1] == 'z' || given[i + 1] == 'Z');  // Python's now() has none
    const bool is_pair = given[i] == '%' && i + 1 < given.size();
    format += is_zone ? "" : given.substr(i, is_pair ? 2 : 1);
    i += is_pair ? 1 : 0;
  }
  char text[4096];
  const size_t size = std::strftime(text, sizeof text, format.c_str(), &runtime.now);
  return runtime.string(std::string(text, size));
}

}  // namespace

Status define_globals(Scope& scope, Runtime& runtime) {
  using Function = Result<Value> (*)(Runtime&, Arguments&);
  constexpr std::pair<std::string_view, Function> kGlobals[] = {
      {"range", range},
      {"dict", make_dict},
      {"namespace", make_namespace},
      {"raise_exception", raise_exception},
      {"strftime_now", strftime_now}};
  for (const auto& [name, function] : kGlobals) {
    NIBBLE_ASSIGN_OR_RETURN(Value callable, runtime.callable(std::string(name), function));
    scope.variables.insert_or_assign(std::string(name), std::move(callable));
  }
  return {};
}

}  // namespace nibble::jinja
