#include "server/running_answers.h"

#include <utility>

namespace nibble {

RunningAnswers::Entry::Entry(std::shared_ptr<RunningAnswers> list, std::string id, Flags cancelled)
    : list_(std::move(list)), cancelled_(std::move(cancelled)) {
  const std::lock_guard lock(list_->mutex_);
  place_ = list_->entries_.emplace(std::move(id), this);
}

RunningAnswers::Entry::~Entry() {
  const std::lock_guard lock(list_->mutex_);
  list_->entries_.erase(place_);
}

void RunningAnswers::Entry::end() {
  ended_ = true;
  for (const auto& flag : cancelled_) {
    flag->store(true);
  }
}

size_t RunningAnswers::end(std::string_view id) {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  const auto [first, last] = entries_.equal_range(id);
  for (auto entry = first; entry != last; ++entry, ++count) {
    entry->second->end();
  }
  return count;
}

size_t RunningAnswers::end_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, entry] : entries_) {
    entry->end();
  }
  return entries_.size();
}

}  // namespace nibble
