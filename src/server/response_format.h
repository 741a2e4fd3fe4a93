#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/answer_format.h"
#include "server/response_store.h"

namespace nibble {

/// What is known of a response before it is made.
struct ResponsePlan {
  std::string id;
  Json members;                          // of the object, which repeat the request
  JsonArray items;                       // of the conversation so far
  std::shared_ptr<ResponseStore> store;  // null: it is not kept
};

/// Events and objects of OpenAI's responses. Whole answers are made of the same pieces.
class ResponseFormat final : public AnswerFormat {
 public:
  explicit ResponseFormat(ResponsePlan plan);
  ~ResponseFormat() override;
  ResponseFormat(const ResponseFormat&) = delete;
  ResponseFormat& operator=(const ResponseFormat&) = delete;

  std::string whole_body(const std::vector<Choice>& choices, const Usage& total) override;
  std::string stream_begin(const Choice& choice) override;
  std::string stream_piece(const Choice& choice, const AnswerPiece& piece, int64_t call) override;
  std::string stream_choice_end(const Choice& choice) override;
  std::string stream_end(const Usage& total) override;
  std::string stream_failure(const ApiError& error) override;

 private:
  using Kind = AnswerPiece::Kind;
  using Members = std::vector<JsonObject::Member>;

  std::string event(const char* type, Members members);
  [[nodiscard]] Json response(const char* status, const Json& usage) const;
  Json finished(const Usage& total);
  std::string add_text(Kind kind, const std::string& text);
  std::string open_call(const AnswerPiece& piece);
  std::string open_item(Kind kind, Json item);
  std::string close_item(const char* status);
  std::string close_text();
  std::string close_call();
  [[nodiscard]] Members place() const;
  [[nodiscard]] Members part_place() const;
  [[nodiscard]] Json part(const std::string& text) const;
  [[nodiscard]] std::string item_id(const char* prefix) const;

  ResponsePlan plan_;
  int64_t sequence_ = 0;
  JsonArray output_;   // items that are over
  Json open_;          // the one that is not; null: none
  Kind kind_ = {};     // of the open one: kContent, kReasoning or kCallBegin
  std::string text_;   // of the open one, or its arguments
  std::string ended_;  // why: Choice::finish_reason
  bool kept_ = false;  // what the store has is final
};

}  // namespace nibble
