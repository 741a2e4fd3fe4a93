#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/jinja/value.h"

namespace nibble::jinja {

/// Canonical text of a hashable value: equal values have equal texts (1, 1.0 and True are one key).
/// Errors: kInvalidArgument for lists, dicts and tuples that hold them.
Result<std::string> key_text(const Value& key);

/// A Python dict: members in insertion order, hashed lookup.
class Dict final {
 public:
  struct Member {
    Value key;
    Value value;
  };

  [[nodiscard]] const Value* find(std::string_view name) const;
  /// nullptr if absent; errors for unhashable keys.
  [[nodiscard]] Result<const Value*> find(const Value& key) const;
  Status set(const Value& key, Value value);
  void set(std::string_view name, Value value);
  /// Removes and returns a member; nullopt if there is none.
  Result<std::optional<Value>> take(const Value& key);
  void clear();

  [[nodiscard]] size_t size() const { return members_.size(); }
  [[nodiscard]] const std::vector<Member>& members() const { return members_; }

 private:
  void insert(std::string key_text, Value key, Value value);

  std::vector<Member> members_;
  std::unordered_map<std::string, size_t> index_;  // by key_text
};

}  // namespace nibble::jinja
