#include "server/continued_message.h"

#include <utility>

#include "server/http.h"

namespace nibble {

Result<std::string> render_continued(const TextFrontend& text, const ChatInput& input) {
  // A mark that nobody can know shows where the message ends; the blank behind it, whether blanks
  // at its end stay.
  const std::string mark = "open" + random_id();
  Json messages = *input.messages;
  Json& last = messages.as_array().back();
  const Json* content = last.find("content");
  const std::string shown =
      content != nullptr && content->is_string() ? content->as_string() : std::string();
  last.set("content", shown + mark + " ");
  ChatInput marked = input;
  marked.messages = &messages;
  marked.add_generation_prompt = false;
  NIBBLE_ASSIGN_OR_RETURN(std::string prompt, text.render_chat(marked));
  const size_t at = prompt.rfind(mark);
  if (at == std::string::npos) {
    return make_error(StatusCode::kInvalidArgument,
                      "continue_final_message: the chat template does not show the last message's "
                      "text as it is; send a prompt to /v1/completions instead");
  }
  const bool keeps_blanks = prompt.compare(at + mark.size(), 1, " ") == 0;
  prompt.resize(at);
  if (!keeps_blanks) {
    prompt.resize(prompt.find_last_not_of(" \t\r\n") + 1);
  }
  return prompt;
}

}  // namespace nibble
