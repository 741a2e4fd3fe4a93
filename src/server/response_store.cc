#include "server/response_store.h"

#include <iterator>
#include <utility>

namespace nibble {

size_t ResponseStore::size_of(const Entry& entry) {
  return entry.id.size() + entry.stored.response.size() + entry.stored.items.size();
}

void ResponseStore::remove(List::iterator entry) {
  bytes_ -= size_of(*entry);
  by_id_.erase(entry->id);
  entries_.erase(entry);
}

void ResponseStore::put(const std::string& id, Stored stored) {
  const std::lock_guard lock(mutex_);
  if (const auto found = by_id_.find(id); found != by_id_.end()) {
    remove(found->second);
  }
  Entry entry{id, std::move(stored)};
  if (size_of(entry) > limits_.bytes) {
    return;
  }
  entries_.push_back(std::move(entry));
  const auto last = std::prev(entries_.end());
  by_id_.emplace(id, last);
  bytes_ += size_of(*last);
  while (!entries_.empty() && (entries_.size() > limits_.count || bytes_ > limits_.bytes)) {
    remove(entries_.begin());
  }
}

std::optional<ResponseStore::Stored> ResponseStore::find(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? std::nullopt : std::optional(found->second->stored);
}

bool ResponseStore::erase(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) {
    return false;
  }
  remove(found->second);
  return true;
}

size_t ResponseStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace nibble
