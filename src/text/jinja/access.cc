#include <algorithm>

#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

Result<Value> no_such_attribute(const Value& object, const std::string& name) {
  return Value::undefined(
      fmt::format("'{} object' has no attribute '{}'", object.type_name(), name));
}

Status undefined_error(const Value& value) {
  return Status(StatusCode::kInvalidArgument, value.why_undefined());
}

Result<Value> neighbour(const Loop& loop, int64_t offset, std::string_view what) {
  const int64_t index = static_cast<int64_t>(loop.index) + offset;
  if (index < 0 || index >= static_cast<int64_t>(loop.items.size())) {
    return Value::undefined(fmt::format("there is no {} item", what));
  }
  return loop.items[static_cast<size_t>(index)];
}

Result<Value> cycle(Loop* loop, Arguments& arguments) {
  if (arguments.positional.empty()) {
    return template_error("loop.cycle() needs values");
  }
  return arguments.positional[loop->index % arguments.positional.size()];
}

Result<Value> changed(Loop* loop, Arguments& arguments, Runtime& runtime) {
  bool same = loop->has_changed_value && loop->changed_value.size() == arguments.positional.size();
  for (size_t i = 0; same && i < arguments.positional.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(same, equal(loop->changed_value[i], arguments.positional[i], runtime));
  }
  loop->has_changed_value = true;
  loop->changed_value = arguments.positional;
  return Value::boolean(!same);
}

Result<Value> loop_attribute(Loop* loop, const std::string& name, Runtime& runtime) {
  const auto count = [](size_t value) { return Value::integer(static_cast<Integer>(value)); };
  const size_t size = loop->items.size();
  const std::pair<std::string_view, Value> numbers[] = {
      {"index", count(loop->index + 1)},
      {"index0", count(loop->index)},
      {"revindex", count(size - loop->index)},
      {"revindex0", count(size - loop->index - 1)},
      {"first", Value::boolean(loop->index == 0)},
      {"last", Value::boolean(loop->index + 1 == size)},
      {"length", count(size)},
      {"depth", count(loop->depth + 1)},
      {"depth0", count(loop->depth)}};
  for (const auto& [number, value] : numbers) {
    if (number == name) {
      return value;
    }
  }
  if (name == "previtem") {
    return neighbour(*loop, -1, "previous");
  }
  if (name == "nextitem") {
    return neighbour(*loop, 1, "next");
  }
  if (name == "cycle") {
    return runtime.callable(
        name, [loop](Runtime&, Arguments& arguments) { return cycle(loop, arguments); });
  }
  if (name == "changed") {
    return runtime.callable(name, [loop](Runtime& active, Arguments& arguments) {
      return changed(loop, arguments, active);
    });
  }
  return no_such_attribute(Value::loop(loop), name);
}

// A method, or what a namespace or loop holds; undefined if there is none.
Result<Value> own_attribute(const Value& object, const std::string& name, Runtime& runtime) {
  if (object.is(Value::Kind::kNamespace)) {
    const Value* found = object.as_namespace()->members->find(name);
    return found != nullptr ? Result<Value>(*found) : no_such_attribute(object, name);
  }
  if (object.is(Value::Kind::kLoop)) {
    return loop_attribute(object.as_loop(), name, runtime);
  }
  if (const Method method = find_method(object.kind(), name); method != nullptr) {
    return runtime.callable(name, [method, object](Runtime& active, Arguments& arguments) {
      return method(active, object, arguments);
    });
  }
  return no_such_attribute(object, name);
}

// The item, or nullopt-like undefined when the index does not fit the object.
Result<std::optional<Value>> find_item(const Value& object, const Value& index, Runtime& runtime) {
  if (object.is(Value::Kind::kDict)) {
    Result<const Value*> found = object.as_dict()->find(index);
    // An unhashable key is no member, and no error either (Jinja2 tries the attribute next).
    return found.ok() && *found != nullptr ? std::optional<Value>(**found) : std::nullopt;
  }
  if (!index.is_integral()) {
    return std::optional<Value>();
  }
  Integer place = index.as_integer();
  if (object.is_string()) {
    const std::string& text = object.as_string();
    NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size()));
    const auto size = static_cast<Integer>(count_code_points(text));
    place += place < 0 ? size : 0;
    if (place < 0 || place >= size) {
      return std::optional<Value>();
    }
    const size_t begin = byte_offset(text, static_cast<size_t>(place));
    const std::string_view rest = std::string_view(text).substr(begin);
    return std::optional<Value>(Value::string(std::string(rest.substr(0, byte_offset(rest, 1)))));
  }
  const std::vector<Value>* items = object.items();
  if (items == nullptr) {
    return std::optional<Value>();
  }
  place += place < 0 ? static_cast<Integer>(items->size()) : 0;
  if (place < 0 || place >= static_cast<Integer>(items->size())) {
    return std::optional<Value>();
  }
  return std::optional<Value>((*items)[static_cast<size_t>(place)]);
}

struct SliceRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t step = 1;
};

// Python's slice.indices.
Result<SliceRange> resolve(const SliceBounds& bounds, int64_t size) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t step, integer_argument(bounds.step, 1, "slice step"));
  if (step == 0) {
    return template_error("slice step cannot be zero");
  }
  const int64_t low = step > 0 ? 0 : -1;
  const int64_t high = step > 0 ? size : size - 1;
  const auto clamp = [&](int64_t place) {
    return std::clamp(place < 0 ? std::max(place, -size - 1) + size : place, low, high);
  };
  const auto is_absent = [](const Value& value) { return value.is_undefined() || value.is_none(); };
  NIBBLE_ASSIGN_OR_RETURN(const int64_t first, integer_argument(bounds.first, 0, "slice start"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t last, integer_argument(bounds.last, 0, "slice end"));
  return SliceRange{.first = is_absent(bounds.first) ? (step > 0 ? low : high) : clamp(first),
                    .last = is_absent(bounds.last) ? (step > 0 ? high : low) : clamp(last),
                    .step = std::clamp<int64_t>(step, -size - 1, size + 1)};
}

template <typename T>
std::vector<T> pick(const std::vector<T>& items, const SliceRange& range) {
  std::vector<T> picked;
  for (int64_t i = range.first; range.step > 0 ? i < range.last : i > range.last; i += range.step) {
    picked.push_back(items[static_cast<size_t>(i)]);
  }
  return picked;
}

}  // namespace

Result<Value> get_attribute(const Value& object, const std::string& name, Runtime& runtime) {
  if (object.is_undefined()) {
    return undefined_error(object);
  }
  NIBBLE_ASSIGN_OR_RETURN(Value attribute, own_attribute(object, name, runtime));
  if (attribute.is_undefined() && object.is(Value::Kind::kDict)) {
    if (const Value* found = object.as_dict()->find(name); found != nullptr) {
      return *found;
    }
  }
  return attribute;
}

Result<Value> get_item(const Value& object, const Value& index, Runtime& runtime) {
  if (object.is_undefined()) {
    return undefined_error(object);
  }
  NIBBLE_ASSIGN_OR_RETURN(std::optional<Value> item, find_item(object, index, runtime));
  if (item.has_value()) {
    return *std::move(item);
  }
  if (index.is_string()) {
    return own_attribute(object, index.as_string(), runtime);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, to_repr(index, runtime));
  return Value::undefined(fmt::format("{} object has no element {}", object.type_name(), name));
}

Result<Value> get_slice(const Value& object, const SliceBounds& bounds, Runtime& runtime) {
  if (object.is_undefined()) {
    return undefined_error(object);
  }
  if (object.is_string()) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(object.as_string().size() * 4));
    const std::vector<uint32_t> points = code_points(object.as_string());
    NIBBLE_ASSIGN_OR_RETURN(const SliceRange range,
                            resolve(bounds, static_cast<int64_t>(points.size())));
    return runtime.string(from_code_points(pick(points, range)));
  }
  const std::vector<Value>* items = object.items();
  if (items == nullptr) {
    return Value::undefined(fmt::format("'{}' object cannot be sliced", object.type_name()));
  }
  NIBBLE_ASSIGN_OR_RETURN(const SliceRange range,
                          resolve(bounds, static_cast<int64_t>(items->size())));
  return object.is(Value::Kind::kList) ? runtime.list(pick(*items, range))
                                       : runtime.tuple(pick(*items, range));
}

Result<std::vector<Value>> iterate(const Value& value, Runtime& runtime) {
  std::vector<Value> items;
  if (const std::vector<Value>* held = value.items(); held != nullptr) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(held->size() * kItemWork));
    return *held;
  }
  if (value.is(Value::Kind::kDict)) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(value.as_dict()->size() * kItemWork));
    for (const Dict::Member& member : value.as_dict()->members()) {
      items.push_back(member.key);
    }
    return items;
  }
  if (value.is_string()) {
    const std::string& text = value.as_string();
    NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size() * kItemWork));
    for (size_t i = 0; i < text.size();) {
      const size_t begin = i;
      static_cast<void>(next_code_point(text, i));
      items.push_back(Value::string(text.substr(begin, i - begin)));
    }
    return items;
  }
  if (value.is(Value::Kind::kLoop)) {
    return template_error("'LoopContext' object cannot be iterated twice");
  }
  return value.is_undefined() ? Result<std::vector<Value>>(std::move(items))
                              : template_error("'{}' object is not iterable", value.type_name());
}

Result<int64_t> length(const Value& value) {
  if (value.is_undefined()) {
    return 0;
  }
  if (value.is_string()) {
    return static_cast<int64_t>(count_code_points(value.as_string()));
  }
  if (value.is(Value::Kind::kDict)) {
    return static_cast<int64_t>(value.as_dict()->size());
  }
  if (value.is(Value::Kind::kLoop)) {
    return static_cast<int64_t>(value.as_loop()->items.size());
  }
  if (value.items() == nullptr) {
    return template_error("object of type '{}' has no len()", value.type_name());
  }
  return static_cast<int64_t>(value.items()->size());
}

}  // namespace nibble::jinja
