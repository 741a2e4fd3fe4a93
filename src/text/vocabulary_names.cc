#include "text/vocabulary_names.h"

#include <utility>

namespace nibble {
namespace {

constexpr const char* kRemedy =
    "the files of this tokenizer do not belong together or were edited; take all of them from one "
    "release of the model";

}  // namespace

VocabularyNames::VocabularyNames(std::vector<std::string> pieces) : pieces_(std::move(pieces)) {
  ids_.reserve(pieces_.size());
  for (size_t id = 0; id < pieces_.size(); ++id) {
    if (!pieces_[id].empty()) {
      ids_.emplace(pieces_[id], static_cast<int32_t>(id));
    }
  }
}

std::string_view VocabularyNames::name_of(int32_t id) const {
  if (const auto found = added_.find(id); found != added_.end()) {
    return found->second;
  }
  const auto index = static_cast<size_t>(id);
  return id >= 0 && index < pieces_.size() ? std::string_view(pieces_[index]) : std::string_view();
}

Status VocabularyNames::add(int32_t id, const std::string& name) {
  const std::string_view known = name_of(id);
  if (known == name) {
    return {};
  }
  if (!known.empty()) {
    return make_error(StatusCode::kCorrupt,
                      "added token '{}' has the id {}, which '{}' has already; {}", name, id, known,
                      kRemedy);
  }
  if (const auto found = ids_.find(name); found != ids_.end()) {
    return make_error(StatusCode::kCorrupt,
                      "added token '{}' has the id {}, but it has the id {} already; {}", name, id,
                      found->second, kRemedy);
  }
  const auto [entry, fresh] = added_.emplace(id, name);
  CHECK(fresh);
  ids_.emplace(entry->second, id);
  return {};
}

}  // namespace nibble
