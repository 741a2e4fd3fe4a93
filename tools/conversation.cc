#include "conversation.h"

#include <utility>

namespace nibble {
namespace {

Json message_of(const char* role, const std::string& content) {
  return Json::object({{"role", role}, {"content", content}});
}

bool has_role(const Json& message, std::string_view role) {
  const Json* found = message.find("role");
  return found != nullptr && found->is_string() && found->as_string() == role;
}

bool is_message(const Json& message) {
  const Json* content = message.find("content");
  return (has_role(message, "user") || has_role(message, "assistant") ||
          has_role(message, "system")) &&
         content != nullptr && content->is_string();
}

}  // namespace

Conversation::Conversation(ChatPartner& partner, std::string system)
    : partner_(partner), system_(std::move(system)) {}

void Conversation::clear() {
  messages_.clear();
  text_.clear();
}

void Conversation::set_system(const std::string& text) { system_ = text; }

// The oldest question and what was answered to it; never the last question.
bool Conversation::drop_oldest(JsonArray& messages) const {
  const size_t first = system_.empty() ? 0 : 1;
  size_t end = first + 1;
  while (end < messages.size() && !has_role(messages[end], "user")) {
    ++end;
  }
  if (end >= messages.size()) {
    return false;
  }
  messages.erase(messages.begin() + static_cast<ptrdiff_t>(first),
                 messages.begin() + static_cast<ptrdiff_t>(end));
  return true;
}

Result<ChatReply> Conversation::turn(const std::string& message,
                                     const AnswerFlags& settings,
                                     Interrupts& interrupts,
                                     const ChatSinks& sinks) {
  JsonArray messages;
  if (!system_.empty()) {
    messages.push_back(message_of("system", system_));
  }
  messages.insert(messages.end(), messages_.begin(), messages_.end());
  messages.push_back(message_of("user", message));
  const std::string text = text_ + message;
  left_out_ = 0;
  auto reply = partner_.reply({messages, text, settings, interrupts}, sinks);
  while (!reply.ok() && reply.status().code() == StatusCode::kResourceExhausted &&
         drop_oldest(messages)) {
    ++left_out_;
    reply = partner_.reply({messages, text, settings, interrupts}, sinks);
  }
  if (!reply.ok()) {
    return reply.status().code() == StatusCode::kResourceExhausted
               ? make_error(StatusCode::kInvalidArgument, "this message does not fit: {}",
                            reply.status().message())
               : reply.status();
  }
  if (partner_.chats()) {
    messages_.push_back(message_of("user", message));
    messages_.push_back(message_of("assistant", reply->text));
  } else {
    text_ = text + reply->text;
  }
  return reply;
}

Json Conversation::to_json() const {
  if (!partner_.chats()) {
    return Json::object({{"text", text_}});
  }
  JsonArray messages;
  if (!system_.empty()) {
    messages.push_back(message_of("system", system_));
  }
  messages.insert(messages.end(), messages_.begin(), messages_.end());
  return Json::object({{"messages", std::move(messages)}});
}

Status Conversation::load(const Json& json) {
  const Json* text = json.find("text");
  const Json* messages = json.find("messages");
  const Json* wanted = partner_.chats() ? messages : text;
  if (wanted == nullptr && (text != nullptr || messages != nullptr)) {
    return make_error(StatusCode::kInvalidArgument, "was saved {}",
                      text != nullptr ? "as text; --text continues it" : "from a chat");
  }
  if (!partner_.chats()) {
    if (wanted == nullptr || !wanted->is_string()) {
      return make_error(StatusCode::kCorrupt, "has no text");
    }
    text_ = wanted->as_string();
    return {};
  }
  if (wanted == nullptr || !wanted->is_array()) {
    return make_error(StatusCode::kCorrupt, "has no list of messages");
  }
  JsonArray loaded;
  std::string system;
  for (const Json& message : wanted->as_array()) {
    if (!is_message(message)) {
      return make_error(StatusCode::kCorrupt, "has a message without role and content");
    }
    if (has_role(message, "system")) {
      system = message.find("content")->as_string();
    } else {
      loaded.push_back(message);
    }
  }
  messages_ = std::move(loaded);
  system_ = std::move(system);
  return {};
}

}  // namespace nibble
