#pragma once

#include <cstddef>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

namespace nibble {

/// Responses that may be asked for again, and continued. Bounded: the oldest go first.
/// Thread-safe.
class ResponseStore final {
 public:
  struct Limits {
    size_t count = 1000;
    size_t bytes = size_t{64} << 20;  // of all texts together
  };
  struct Stored {
    std::string response;  // the object as JSON
    std::string items;     // the conversation up to its end, an array as JSON; "": not over
  };

  ResponseStore() = default;
  explicit ResponseStore(const Limits& limits) : limits_(limits) {}

  /// Replaces what has the same id. One that is larger than all may be is not kept.
  void put(const std::string& id, Stored stored);
  [[nodiscard]] std::optional<Stored> find(const std::string& id) const;
  /// False if there is none.
  bool erase(const std::string& id);
  [[nodiscard]] size_t bytes() const;

 private:
  struct Entry {
    std::string id;
    Stored stored;
  };
  using List = std::list<Entry>;

  static size_t size_of(const Entry& entry);
  void remove(List::iterator entry);

  const Limits limits_ = {};
  mutable std::mutex mutex_;
  List entries_;  // the oldest first
  std::unordered_map<std::string, List::iterator> by_id_;
  size_t bytes_ = 0;
};

}  // namespace nibble
