#pragma once

#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "server/chat_body.h"

namespace nibble {

inline Json parsed(std::string_view text) {
  auto json = Json::parse(text);
  EXPECT_TRUE(json.ok()) << text;
  return json.ok() ? *std::move(json) : Json();
}

/// The chat as text, where there is to be one.
inline std::string chat_text(const ChatBody& chat) {
  const auto* error = std::get_if<ApiError>(&chat);
  EXPECT_EQ(error, nullptr) << (error != nullptr ? error->message : "");
  return error == nullptr ? std::get<TranslatedBody>(chat).body.dump() : "";
}

/// Why there is no chat, where there is to be none.
inline ApiError chat_error(const ChatBody& chat, std::string_view body) {
  const auto* error = std::get_if<ApiError>(&chat);
  EXPECT_NE(error, nullptr) << body;
  return error != nullptr ? *error : ApiError{};
}

}  // namespace nibble
