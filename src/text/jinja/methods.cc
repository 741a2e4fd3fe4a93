#include "text/jinja/methods.h"

#include <algorithm>
#include <unordered_set>

#include "text/jinja/operators.h"
#include "text/jinja/utf8.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {

Method find_method(Value::Kind kind, std::string_view name) {
  return kind == Value::Kind::kString ? find_string_method(name)
                                      : find_container_method(kind, name);
}

Result<Value> replace_text(Runtime& runtime,
                           const std::string& text,
                           const std::string& old,
                           const std::string& with,
                           int64_t count) {
  // Bounded before building: as many replacements as bytes, each adding the new text.
  std::string out;
  NIBBLE_RETURN_IF_ERROR(runtime.charge(text.size()));
  size_t position = 0;
  while (count != 0) {
    // An empty `old` stands before every character and at the end.
    const size_t place = old.empty() ? position : text.find(old, position);
    if (place == std::string::npos) {
      break;
    }
    NIBBLE_RETURN_IF_ERROR(runtime.charge(with.size() + 1));
    out.append(text, position, place - position);
    out += with;
    position = place + old.size();
    count -= count > 0 ? 1 : 0;
    if (old.empty()) {
      if (position >= text.size()) {
        break;
      }
      const size_t begin = position;
      static_cast<void>(next_code_point(text, position));
      out.append(text, begin, position - begin);
    }
  }
  out.append(text, std::min(position, text.size()));
  return runtime.string(std::move(out));
}

Status sort_values(Runtime& runtime, std::vector<std::pair<Value, Value>>& keyed_items) {
  // std::stable_sort needs a consistent order even when a comparison fails, so after a failure
  // everything counts as equal.
  Status failure;
  std::stable_sort(keyed_items.begin(), keyed_items.end(), [&](const auto& a, const auto& b) {
    if (!failure.ok()) {
      return false;
    }
    const Result<bool> is_less = less(a.first, b.first, runtime);
    if (!is_less.ok()) {
      failure = is_less.status();
      return false;
    }
    return *is_less;
  });
  return failure;
}

Result<Value> join_values(Runtime& runtime,
                          const std::vector<Value>& items,
                          const std::string& separator) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string text, to_text(items[i], runtime));
    NIBBLE_RETURN_IF_ERROR(runtime.charge(separator.size()));
    out += i == 0 ? "" : separator;
    out += text;
  }
  return runtime.string(std::move(out));
}

Result<Value> strip_text(Runtime& runtime,
                         const std::string& text,
                         const Value& characters,
                         StripSide side) {
  std::string_view kept = text;
  if (characters.is_undefined() || characters.is_none()) {
    kept = side == StripSide::kRight ? kept : strip_left(kept);
    kept = side == StripSide::kLeft ? kept : strip_right(kept);
    return runtime.string(std::string(kept));
  }
  if (!characters.is_string()) {
    return template_error("strip: expected a string, got {}", characters.type_name());
  }
  NIBBLE_RETURN_IF_ERROR(runtime.charge(4 * text.size() + characters.as_string().size()));
  const std::vector<uint32_t> points = code_points(text);
  const std::vector<uint32_t> set_points = code_points(characters.as_string());
  const std::unordered_set<uint32_t> set(set_points.begin(), set_points.end());
  size_t first = 0;
  size_t last = points.size();
  while (side != StripSide::kRight && first < last && set.contains(points[first])) {
    ++first;
  }
  while (side != StripSide::kLeft && last > first && set.contains(points[last - 1])) {
    --last;
  }
  const size_t begin = byte_offset(text, first);
  kept = kept.substr(begin);
  return runtime.string(std::string(kept.substr(0, byte_offset(kept, last - first))));
}

Result<Value> dict_items(Runtime& runtime, const Dict& dict) {
  std::vector<Value> items;
  for (const Dict::Member& member : dict.members()) {
    NIBBLE_ASSIGN_OR_RETURN(Value pair, runtime.tuple({member.key, member.value}));
    items.push_back(std::move(pair));
  }
  return runtime.list(std::move(items));
}

}  // namespace nibble::jinja
