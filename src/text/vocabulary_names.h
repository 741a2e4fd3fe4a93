#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"

namespace nibble {

/// Which name belongs to which id in the files of a tokenizer. They say some of it more than once
/// (vocabulary, added_tokens, added_tokens_decoder), and have to say the same.
class VocabularyNames final {
 public:
  /// The vocabulary by id, as its file writes it ("Ġthe", "▁the"); "" where an id is unused.
  explicit VocabularyNames(std::vector<std::string> pieces);
  VocabularyNames(VocabularyNames&&) = default;
  VocabularyNames& operator=(VocabularyNames&&) = default;
  VocabularyNames(const VocabularyNames&) = delete;  // ids_ points into pieces_ and added_
  VocabularyNames& operator=(const VocabularyNames&) = delete;
  ~VocabularyNames() = default;

  /// Takes in that `id` is called `name`. Saying so again is fine.
  /// Errors: kCorrupt if the id has another name or the name another id.
  Status add(int32_t id, const std::string& name);
  /// What `id` is called so far; "" if nothing.
  [[nodiscard]] std::string_view name_of(int32_t id) const;

 private:
  std::vector<std::string> pieces_;
  std::unordered_map<int32_t, std::string> added_;
  std::unordered_map<std::string_view, int32_t> ids_;
};

}  // namespace nibble
