#include <algorithm>
#include <unordered_set>

#include "text/jinja/filters.h"
#include "text/jinja/methods.h"
#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {
namespace {

Result<Value> length_filter(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"length", {}, 0}, args).status());
  NIBBLE_RETURN_IF_ERROR(
      runtime.charge(subject.is_string() ? subject.as_string().size() : kNodeWork));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t size, length(subject));
  return Value::integer(size);
}

Result<Value> default_filter(Runtime&, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"default", {"default_value", "boolean"}, 0}, args));
  const bool is_missing = subject.is_undefined() || (a[1].truthy() && !subject.truthy());
  const bool has_value = args.positional.size() + args.named.size() > 0;
  return !is_missing ? subject : has_value ? a[0] : Value::string("");
}

Result<Value> list_filter(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"list", {}, 0}, args).status());
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(subject, runtime));
  return runtime.list(std::move(items));
}

Result<Value> first(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"first", {}, 0}, args).status());
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(subject, runtime));
  return items.empty() ? Value::undefined("No first item, sequence was empty.") : items.front();
}

Result<Value> last(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"last", {}, 0}, args).status());
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(subject, runtime));
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

// The attribute of every item, or the items themselves when none is asked for.
Result<std::vector<Value>> attributes(Runtime& runtime,
                                      std::vector<Value> items,
                                      const Value& attribute) {
  if (attribute.is_undefined() || attribute.is_none()) {
    return items;
  }
  for (Value& item : items) {
    NIBBLE_ASSIGN_OR_RETURN(item, attribute_of(item, attribute, runtime));
  }
  return items;
}

Result<Value> join(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"join", {"d", "attribute"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(subject, runtime));
  NIBBLE_ASSIGN_OR_RETURN(items, attributes(runtime, std::move(items), a[1]));
  NIBBLE_ASSIGN_OR_RETURN(const std::string separator, to_text(a[0], runtime));
  return join_values(runtime, items, separator);
}

Result<Value> items_filter(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"items", {}, 0}, args).status());
  if (subject.is_undefined()) {
    return runtime.list({});
  }
  if (!subject.is(Value::Kind::kDict)) {
    return template_error("Can only get item pairs from a mapping.");
  }
  return dict_items(runtime, *subject.as_dict());
}

Result<Value> reverse(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_RETURN_IF_ERROR(bind({"reverse", {}, 0}, args).status());
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(subject, runtime));
  std::reverse(items.begin(), items.end());
  return subject.is_string() ? join_values(runtime, items, "") : runtime.list(std::move(items));
}

// Items sorted by their keys; equal ones keep their order, also when reversed.
Result<std::vector<Value>> sorted(Runtime& runtime,
                                  std::vector<std::pair<Value, Value>> keyed,
                                  const Value& reverses) {
  if (reverses.truthy()) {
    std::reverse(keyed.begin(), keyed.end());
  }
  NIBBLE_RETURN_IF_ERROR(sort_values(runtime, keyed));
  std::vector<Value> items;
  for (auto& [key, item] : keyed) {
    items.push_back(std::move(item));
  }
  if (reverses.truthy()) {
    std::reverse(items.begin(), items.end());
  }
  return items;
}

// Pairs each item with what it is compared by.
Result<std::vector<std::pair<Value, Value>>> keyed_items(Runtime& runtime,
                                                         const Value& subject,
                                                         const Value& attribute,
                                                         const Value& case_sensitive) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(subject, runtime));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> keys, attributes(runtime, items, attribute));
  std::vector<std::pair<Value, Value>> keyed;
  for (size_t i = 0; i < items.size(); ++i) {
    keyed.emplace_back(comparison_key(keys[i], case_sensitive), items[i]);
  }
  return keyed;
}

Result<Value> sort(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a,
                          bind({"sort", {"reverse", "case_sensitive", "attribute"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(auto keyed, keyed_items(runtime, subject, a[2], a[1]));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, sorted(runtime, std::move(keyed), a[0]));
  return runtime.list(std::move(items));
}

Result<Value> dictsort(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a,
                          bind({"dictsort", {"case_sensitive", "by", "reverse"}, 0}, args));
  if (!subject.is(Value::Kind::kDict)) {
    return template_error("dictsort: expected a dict, got {}", subject.type_name());
  }
  const bool by_value = a[1].is_string() && a[1].as_string() == "value";
  NIBBLE_ASSIGN_OR_RETURN(const Value pairs, dict_items(runtime, *subject.as_dict()));
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& pair : *pairs.items()) {
    keyed.emplace_back(comparison_key((*pair.items())[by_value ? 1 : 0], a[0]), pair);
  }
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, sorted(runtime, std::move(keyed), a[2]));
  return runtime.list(std::move(items));
}

Result<Value> unique(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"unique", {"case_sensitive", "attribute"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const auto keyed, keyed_items(runtime, subject, a[1], a[0]));
  std::unordered_set<std::string> seen;
  std::vector<Value> kept;
  for (const auto& [key, item] : keyed) {
    NIBBLE_ASSIGN_OR_RETURN(std::string text, key_text(key));
    if (seen.insert(std::move(text)).second) {
      kept.push_back(item);
    }
  }
  return runtime.list(std::move(kept));
}

template <bool kWantsLess>
Result<Value> extreme(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"min", {"case_sensitive", "attribute"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(const auto keyed, keyed_items(runtime, subject, a[1], a[0]));
  if (keyed.empty()) {
    return Value::undefined("No aggregated item, sequence was empty.");
  }
  size_t best = 0;
  for (size_t i = 1; i < keyed.size(); ++i) {
    const Value& challenger = keyed[i].first;
    const Value& champion = keyed[best].first;
    NIBBLE_ASSIGN_OR_RETURN(const bool wins, kWantsLess ? less(challenger, champion, runtime)
                                                        : less(champion, challenger, runtime));
    best = wins ? i : best;
  }
  return keyed[best].second;
}

Result<Value> sum(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"sum", {"attribute", "start"}, 0}, args));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(subject, runtime));
  NIBBLE_ASSIGN_OR_RETURN(items, attributes(runtime, std::move(items), a[0]));
  Value total = a[1].is_undefined() ? Value::integer(0) : a[1];
  for (const Value& item : items) {
    NIBBLE_ASSIGN_OR_RETURN(total, apply_binary(Operator::kAdd, total, item, runtime));
  }
  return total;
}

Result<Value> batch(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"batch", {"linecount", "fill_with"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t size, integer_argument(a[0], 1, "batch"));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(subject, runtime));
  if (size < 1) {
    return template_error("batch: the size must be positive");
  }
  std::vector<Value> rows;
  for (size_t i = 0; i < items.size(); i += static_cast<size_t>(size)) {
    const size_t end = std::min(items.size(), i + static_cast<size_t>(size));
    std::vector<Value> row(items.begin() + static_cast<std::ptrdiff_t>(i),
                           items.begin() + static_cast<std::ptrdiff_t>(end));
    if (!a[1].is_undefined() && !a[1].is_none()) {
      NIBBLE_RETURN_IF_ERROR(runtime.charge(static_cast<uint64_t>(size) * kItemWork));
      row.resize(static_cast<size_t>(size), a[1]);
    }
    NIBBLE_ASSIGN_OR_RETURN(Value list, runtime.list(std::move(row)));
    rows.push_back(std::move(list));
  }
  return runtime.list(std::move(rows));
}

// Tuples (grouper, items) in order of the grouper.
Result<Value> groupby(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"groupby", {"attribute"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(auto keyed, keyed_items(runtime, subject, a[0], Value()));
  NIBBLE_RETURN_IF_ERROR(sort_values(runtime, keyed));
  std::vector<Value> groups;
  for (size_t i = 0; i < keyed.size();) {
    std::vector<Value> members;
    NIBBLE_ASSIGN_OR_RETURN(Value grouper, attribute_of(keyed[i].second, a[0], runtime));
    const size_t begin = i;
    for (bool same = true; same; ++i) {
      members.push_back(keyed[i].second);
      if (i + 1 == keyed.size()) {
        same = false;
        continue;
      }
      NIBBLE_ASSIGN_OR_RETURN(same, equal(keyed[begin].first, keyed[i + 1].first, runtime));
    }
    NIBBLE_ASSIGN_OR_RETURN(Value list, runtime.list(std::move(members)));
    NIBBLE_ASSIGN_OR_RETURN(Value group, runtime.tuple({std::move(grouper), std::move(list)}));
    groups.push_back(std::move(group));
  }
  return runtime.list(std::move(groups));
}

Result<Value> attr(Runtime& runtime, const Value& subject, const Arguments& args) {
  NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"attr", {"name"}, 1}, args));
  NIBBLE_ASSIGN_OR_RETURN(const std::string name, to_text(a[0], runtime));
  // Unlike a dot, this filter sees no members of a dict.
  return subject.is(Value::Kind::kDict) && find_method(subject.kind(), name) == nullptr
             ? Result<Value>(
                   Value::undefined(fmt::format("'dict object' has no attribute '{}'", name)))
             : get_attribute(subject, name, runtime);
}

}  // namespace

Filter find_sequence_filter(std::string_view name) {
  constexpr std::pair<std::string_view, Filter> kFilters[] = {{"length", length_filter},
                                                              {"count", length_filter},
                                                              {"default", default_filter},
                                                              {"d", default_filter},
                                                              {"list", list_filter},
                                                              {"first", first},
                                                              {"last", last},
                                                              {"join", join},
                                                              {"items", items_filter},
                                                              {"reverse", reverse},
                                                              {"sort", sort},
                                                              {"dictsort", dictsort},
                                                              {"unique", unique},
                                                              {"min", extreme<true>},
                                                              {"max", extreme<false>},
                                                              {"sum", sum},
                                                              {"batch", batch},
                                                              {"groupby", groupby},
                                                              {"attr", attr}};
  for (const auto& [filter, function] : kFilters) {
    if (filter == name) {
      return function;
    }
  }
  return nullptr;
}

}  // namespace nibble::jinja
