#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/json.h"
#include "interrupts.h"
#include "model_flags.h"

namespace nibble {

/// What a reply follows.
struct ChatTurn {
  const JsonArray& messages;  // of a chat
  const std::string& text;    // else all text so far
  const AnswerFlags& settings;
  Interrupts& interrupts;  // end the reply early, and stay to be taken
};

struct ChatSinks {
  std::function<void(std::string_view)> on_text;
  std::function<void(std::string_view)> on_reasoning;
};

struct ChatReply {
  std::string text;           // without reasoning
  std::string finish_reason;  // stop, length or cancelled
  int64_t tokens = 0;         // with reasoning
  double ttft_ms = 0;
  double seconds = 0;  // from the first token to the last
  bool cut = false;    // the beginning of the text was left out, since the context is full
};

/// Who replies in a chat.
class ChatPartner {
 public:
  virtual ~ChatPartner() = default;
  /// "storyteller (bf16)"
  [[nodiscard]] virtual std::string title() const = 0;
  /// False: it continues text. True: it answers messages.
  [[nodiscard]] virtual bool chats() const = 0;
  /// kResourceExhausted when the messages, or what is left of them, are too long for the context.
  virtual Result<ChatReply> reply(const ChatTurn& turn, const ChatSinks& sinks) = 0;
};

/// How the partner is asked: as the model can, or by continuing text in any case.
enum class ChatForm : uint8_t { kAsModel, kText };

/// Loads a model.
Result<std::unique_ptr<ChatPartner>> open_local_partner(const ModelFlags& flags, ChatForm form);

struct RemoteFlags {
  std::string url;
  std::string model;  // "": the server's first
  std::string api_key;
};
/// Finds a model behind a URL. kUnavailable when no server answers.
Result<std::unique_ptr<ChatPartner>> open_remote_partner(const RemoteFlags& flags, ChatForm form);

}  // namespace nibble
