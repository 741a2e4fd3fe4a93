#include "server/token_ids.h"

#include <algorithm>
#include <span>

namespace nibble {
namespace {

JsonArray ids_of(std::span<const int32_t> tokens) { return {tokens.begin(), tokens.end()}; }

Json& choice_in(Json& answer, size_t index) {
  return answer.as_object().find("choices")->as_array().at(index);
}

}  // namespace

TokenIds::TokenIds(const GenerationRequest& request)
    : wanted_(request.return_token_ids), beside_choices_(request.messages.is_array()) {}

void TokenIds::add_to(Json& answer, const std::vector<Choice>& choices) const {
  for (size_t i = 0; wanted_ && i < choices.size(); ++i) {
    choice_in(answer, i).set("token_ids", ids_of(choices[i].tokens));
    add_prompt(answer, i, choices[i]);
  }
}

void TokenIds::add_new_to(Json& event, const Choice& choice) {
  if (!wanted_) {
    return;
  }
  const auto index = static_cast<size_t>(choice.index);
  sent_.resize(std::max(sent_.size(), index + 1));
  const size_t before = sent_[index].value_or(0);
  choice_in(event, 0).set("token_ids", ids_of(std::span(choice.tokens).subspan(before)));
  if (!sent_[index]) {
    add_prompt(event, 0, choice);
  }
  sent_[index] = choice.tokens.size();
}

void TokenIds::add_prompt(Json& answer, size_t index, const Choice& choice) const {
  Json& holder = beside_choices_ ? answer : choice_in(answer, index);
  holder.set("prompt_token_ids", ids_of(choice.prompt));
}

}  // namespace nibble
