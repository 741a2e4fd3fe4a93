#include <algorithm>

#include "text/jinja/methods.h"
#include "text/jinja/operators.h"

namespace nibble::jinja {
namespace {

Status no_arguments(std::string_view method, const Arguments& args) {
  return bind({method, {}, 0}, args).status();
}

Result<Value> append(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"append", {"object"}, 1}, args));
  NIBBLE_RETURN_IF_ERROR(runtime.charge(kItemWork));
  self.items()->push_back(a[0]);
  return Value::none();
}

Result<Value> extend(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"extend", {"iterable"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(a[0], runtime));
  self.items()->insert(self.items()->end(), items.begin(), items.end());
  return Value::none();
}

Result<Value> insert(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"insert", {"index", "object"}, 2}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t index, integer_argument(a[0], 0, "insert"));
  const auto size = static_cast<int64_t>(self.items()->size());
  NIBBLE_RETURN_IF_ERROR(runtime.charge(kItemWork + static_cast<uint64_t>(size)));
  const int64_t place =
      std::clamp<int64_t>(index < 0 ? std::max(index, -size) + size : index, 0, size);
  self.items()->insert(self.items()->begin() + place, a[1]);
  return Value::none();
}

Result<Value> list_pop(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"pop", {"index"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(int64_t index, integer_argument(a[0], -1, "pop"));
  std::vector<Value>& items = *self.items();
  const auto size = static_cast<int64_t>(items.size());
  NIBBLE_RETURN_IF_ERROR(runtime.charge(items.size()));
  index = index < 0 ? std::max(index, -size - 1) + size : index;
  if (index < 0 || index >= size) {
    return template_error("pop: index {} of a list of {} items", index, size);
  }
  Value taken = items[static_cast<size_t>(index)];
  items.erase(items.begin() + index);
  return taken;
}

Result<int64_t> position(Runtime& runtime, const std::vector<Value>& items, const Value& wanted) {
  for (size_t i = 0; i < items.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal(items[i], wanted, runtime));
    if (same) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

Result<Value> remove(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"remove", {"value"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t place, position(runtime, *self.items(), a[0]));
  if (place < 0) {
    return template_error("list.remove(x): x not in list");
  }
  self.items()->erase(self.items()->begin() + place);
  return Value::none();
}

Result<Value> index(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"index", {"value"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t place, position(runtime, *self.items(), a[0]));
  return place < 0 ? Result<Value>(template_error("value is not in list")) : Value::integer(place);
}

Result<Value> count(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"count", {"value"}, 1}, args));
  Integer found = 0;
  for (const Value& item : *self.items()) {
    NIBBLE_ASSIGN_OR_RETURN(const bool same, equal(item, a[0], runtime));
    found += same ? 1 : 0;
  }
  return Value::integer(found);
}

Result<Value> reverse(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("reverse", args));
  NIBBLE_RETURN_IF_ERROR(runtime.charge(self.items()->size()));
  std::reverse(self.items()->begin(), self.items()->end());
  return Value::none();
}

Result<Value> list_copy(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("copy", args));
  return runtime.list(*self.items());
}

Result<Value> list_clear(Runtime&, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("clear", args));
  self.items()->clear();
  return Value::none();
}

Result<Value> sort(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"sort", {"reverse"}, 0}, args));
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : *self.items()) {
    keyed.emplace_back(item, item);
  }
  const bool reverses = a[0].truthy();
  if (reverses) {
    std::reverse(keyed.begin(), keyed.end());  // keeps equal items in their order
  }
  NIBBLE_RETURN_IF_ERROR(sort_values(runtime, keyed));
  if (reverses) {
    std::reverse(keyed.begin(), keyed.end());
  }
  for (size_t i = 0; i < keyed.size(); ++i) {
    (*self.items())[i] = keyed[i].second;
  }
  return Value::none();
}

Result<Value> get(Runtime&, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"get", {"key", "default"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const Value* found, self.as_dict()->find(a[0]));
  const bool has_default = args.positional.size() + args.named.size() > 1;
  return found != nullptr ? *found : has_default ? a[1] : Value::none();
}

Result<Value> items(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("items", args));
  return dict_items(runtime, *self.as_dict());
}

Result<Value> keys(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("keys", args));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> names, iterate(self, runtime));
  return runtime.list(std::move(names));
}

Result<Value> values(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("values", args));
  std::vector<Value> held;
  for (const Dict::Member& member : self.as_dict()->members()) {
    held.push_back(member.value);
  }
  return runtime.list(std::move(held));
}

Result<Value> dict_pop(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"pop", {"key", "default"}, 1}, args));
  NIBBLE_RETURN_IF_ERROR(runtime.charge(self.as_dict()->size() * 4));
  NIBBLE_ASSIGN_OR_RETURN(std::optional<Value> taken, self.as_dict()->take(a[0]));
  if (taken.has_value()) {
    return *std::move(taken);
  }
  if (args.positional.size() + args.named.size() > 1) {
    return a[1];
  }
  return template_error("pop(): the dict has no such key");
}

Result<Value> update(Runtime& runtime, const Value& self, const Arguments& args) {
  if (args.positional.size() > 1) {
    return template_error("update() takes at most 1 argument");
  }
  Dict& dict = *self.as_dict();
  if (args.positional.size() == 1) {
    if (!args.positional[0].is(Value::Kind::kDict)) {
      return template_error("update(): expected a dict, got {}", args.positional[0].type_name());
    }
    const std::vector<Dict::Member> added = args.positional[0].as_dict()->members();
    NIBBLE_RETURN_IF_ERROR(runtime.charge(added.size() * kItemWork));
    for (const Dict::Member& member : added) {
      NIBBLE_RETURN_IF_ERROR(dict.set(member.key, member.value));
    }
  }
  for (const auto& [name, value] : args.named) {
    NIBBLE_RETURN_IF_ERROR(runtime.charge(kItemWork));
    dict.set(name, value);
  }
  return Value::none();
}

Result<Value> setdefault(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"setdefault", {"key", "default"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const Value* found, self.as_dict()->find(a[0]));
  if (found != nullptr) {
    return *found;
  }
  const Value value = a[1].is_undefined() ? Value::none() : a[1];
  NIBBLE_RETURN_IF_ERROR(runtime.charge(kItemWork));
  NIBBLE_RETURN_IF_ERROR(self.as_dict()->set(a[0], value));
  return value;
}

Result<Value> dict_copy(Runtime& runtime, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("copy", args));
  NIBBLE_ASSIGN_OR_RETURN(Value copy, runtime.dict());
  NIBBLE_RETURN_IF_ERROR(runtime.charge(self.as_dict()->size() * kItemWork));
  *copy.as_dict() = *self.as_dict();
  return copy;
}

Result<Value> dict_clear(Runtime&, const Value& self, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(no_arguments("clear", args));
  self.as_dict()->clear();
  return Value::none();
}

}  // namespace

Method find_container_method(Value::Kind kind, std::string_view name) {
  struct Entry {
    Value::Kind kind;
    std::string_view name;
    Method method;
  };
  using Kind = Value::Kind;
  static constexpr Entry kMethods[] = {
      {Kind::kList, "append", append},    {Kind::kList, "extend", extend},
      {Kind::kList, "insert", insert},    {Kind::kList, "pop", list_pop},
      {Kind::kList, "remove", remove},    {Kind::kList, "index", index},
      {Kind::kList, "count", count},      {Kind::kList, "reverse", reverse},
      {Kind::kList, "sort", sort},        {Kind::kList, "copy", list_copy},
      {Kind::kList, "clear", list_clear}, {Kind::kTuple, "index", index},
      {Kind::kTuple, "count", count},     {Kind::kDict, "get", get},
      {Kind::kDict, "items", items},      {Kind::kDict, "keys", keys},
      {Kind::kDict, "values", values},    {Kind::kDict, "pop", dict_pop},
      {Kind::kDict, "update", update},    {Kind::kDict, "setdefault", setdefault},
      {Kind::kDict, "copy", dict_copy},   {Kind::kDict, "clear", dict_clear}};
  for (const Entry& entry : kMethods) {
    if (entry.kind == kind && entry.name == name) {
      return entry.method;
    }
  }
  return nullptr;
}

}  // namespace nibble::jinja
