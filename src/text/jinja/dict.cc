#include "text/jinja/dict.h"

#include <cmath>

#include "base/json.h"

namespace nibble::jinja {
namespace {

std::string string_key(std::string_view name) { return "s" + std::string(name); }

constexpr int kMaxKeyDepth = 16;

Result<std::string> key_text_at(const Value& key, int depth) {
  switch (key.kind()) {
    case Value::Kind::kString:
      return string_key(key.as_string());
    case Value::Kind::kBool:
    case Value::Kind::kInt:
      return fmt::format("n{}", key.as_integer());
    case Value::Kind::kFloat: {
      const double number = key.as_double();
      if (std::fabs(number) < 1e18 && number == std::floor(number)) {
        return fmt::format("n{}", static_cast<int64_t>(number));
      }
      return "f" + format_double(number);
    }
    case Value::Kind::kNone:
      return std::string("N");
    case Value::Kind::kUndefined:
      return std::string("U");
    case Value::Kind::kTuple: {
      if (depth >= kMaxKeyDepth) {
        return make_error(StatusCode::kInvalidArgument, "a dict key is nested too deeply");
      }
      std::string text = "(";
      for (const Value& item : *key.items()) {
        NIBBLE_ASSIGN_OR_RETURN(const std::string part, key_text_at(item, depth + 1));
        text += fmt::format("{}:{}", part.size(), part);
      }
      return text;
    }
    case Value::Kind::kCallable:
      return fmt::format("c{}", static_cast<const void*>(key.as_callable()));
    default:
      return make_error(StatusCode::kInvalidArgument, "unhashable type: '{}'", key.type_name());
  }
}

}  // namespace

Result<std::string> key_text(const Value& key) { return key_text_at(key, 0); }

const Value* Dict::find(std::string_view name) const {
  const auto found = index_.find(string_key(name));
  return found == index_.end() ? nullptr : &members_[found->second].value;
}

Result<const Value*> Dict::find(const Value& key) const {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, key_text(key));
  const auto found = index_.find(text);
  return found == index_.end() ? nullptr : &members_[found->second].value;
}

Status Dict::set(const Value& key, Value value) {
  NIBBLE_ASSIGN_OR_RETURN(std::string text, key_text(key));
  insert(std::move(text), key, std::move(value));
  return {};
}

void Dict::set(std::string_view name, Value value) {
  insert(string_key(name), Value::string(std::string(name)), std::move(value));
}

void Dict::insert(std::string text, Value key, Value value) {
  const auto [entry, is_new] = index_.try_emplace(std::move(text), members_.size());
  if (is_new) {
    members_.push_back({std::move(key), std::move(value)});
  } else {
    members_[entry->second].value = std::move(value);
  }
}

Result<std::optional<Value>> Dict::take(const Value& key) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, key_text(key));
  const auto found = index_.find(text);
  if (found == index_.end()) {
    return std::optional<Value>();
  }
  const size_t position = found->second;
  std::optional<Value> value = std::move(members_[position].value);
  members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(position));
  index_.erase(found);
  for (auto& [name, place] : index_) {
    place -= place > position ? 1 : 0;
  }
  return value;
}

void Dict::clear() {
  members_.clear();
  index_.clear();
}

}  // namespace nibble::jinja
