#include "server/token_ids.h"

#include <utility>

namespace nibble {
namespace {

JsonArray ids_of(const std::vector<int32_t>& tokens) { return {tokens.begin(), tokens.end()}; }

Json& choice_in(Json& answer, size_t index) {
  return answer.as_object().find("choices")->as_array().at(index);
}

void add_prompt_ids(Json& answer, Json& item, const Choice& choice, PromptIdsPlace place) {
  Json& holder = place == PromptIdsPlace::kAnswer ? answer : item;
  holder.set("prompt_token_ids", ids_of(choice.prompt));
}

}  // namespace

void add_token_ids(Json& answer, const std::vector<Choice>& choices, PromptIdsPlace place) {
  for (size_t i = 0; i < choices.size(); ++i) {
    Json& item = choice_in(answer, i);
    item.set("token_ids", ids_of(choices[i].token_ids));
    add_prompt_ids(answer, choice_in(answer, i), choices[i], place);
  }
}

void add_new_token_ids(Json& event, Choice& choice, PromptIdsPlace place) {
  Json& item = choice_in(event, 0);
  item.set("token_ids", ids_of(std::exchange(choice.token_ids, {})));
  if (!std::exchange(choice.prompt_ids_sent, true)) {
    add_prompt_ids(event, choice_in(event, 0), choice, place);
  }
}

}  // namespace nibble
