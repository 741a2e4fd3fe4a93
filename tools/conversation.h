#pragma once

#include <string>

#include "base/json.h"
#include "chat_partner.h"

namespace nibble {

/// What was said so far: messages of a chat, or one text that a base model continues.
class Conversation final {
 public:
  Conversation(ChatPartner& partner, std::string system);

  /// Forgets all but the system message.
  void clear();
  /// Replaces the system message; "" removes it.
  void set_system(const std::string& text);
  /// One turn. When the context is full the oldest turns are left out of what the model sees; of a
  /// turn that fails nothing stays. Errors: kInvalidArgument when this message alone is too long.
  Result<ChatReply> turn(const std::string& message,
                         const AnswerFlags& settings,
                         Interrupts& interrupts,
                         const ChatSinks& sinks);
  /// Turns that the last turn() left out.
  [[nodiscard]] int64_t left_out() const { return left_out_; }

  /// {"messages": [...]} or {"text": "..."}.
  [[nodiscard]] Json to_json() const;
  /// kCorrupt when `json` is not what to_json() gives; kInvalidArgument when it is of the other
  /// form.
  Status load(const Json& json);

 private:
  [[nodiscard]] bool drop_oldest(JsonArray& messages) const;

  ChatPartner& partner_;
  std::string system_;
  JsonArray messages_;  // without the system message
  std::string text_;
  int64_t left_out_ = 0;
};

}  // namespace nibble
