#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "server/choice.h"
#include "server/schema.h"

namespace nibble {

/// Adds token_ids and prompt_token_ids to answers, where a request has return_token_ids. A chat has
/// those of its prompt beside its choices, a completion in each of them.
class TokenIds final {
 public:
  explicit TokenIds(const GenerationRequest& request);

  [[nodiscard]] bool wanted() const { return wanted_; }
  /// To a whole answer.
  void add_to(Json& answer, const std::vector<Choice>& choices) const;
  /// Those that were not sent yet to an event with one choice; the first event of a choice has the
  /// prompt's, too.
  void add_new_to(Json& event, const Choice& choice);

 private:
  void add_prompt(Json& answer, size_t index, const Choice& choice) const;

  bool wanted_, beside_choices_;
  std::vector<std::optional<size_t>> sent_;  // by choice; none: it had no event so far
};

}  // namespace nibble
