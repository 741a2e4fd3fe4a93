#include "server/answer_format.h"

#include <utility>

#include <fmt/format.h>

#include "base/check.h"

namespace nibble {

Json stop_reason(const Choice& choice) {
  if (choice.text.stopped()) {
    return choice.text.stop_string();
  }
  return choice.timed_out ? Json(kTimeoutReason) : Json();
}

Json usage_json(const Usage& usage) {
  return Json::object(
      {{"prompt_tokens", usage.prompt_tokens},
       {"completion_tokens", usage.completion_tokens},
       {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
       {"prompt_tokens_details", Json::object({{"cached_tokens", usage.cached_tokens}})},
       {"completion_tokens_details",
        Json::object({{"reasoning_tokens", usage.reasoning_tokens}})}});
}

std::string data_event(std::string_view data) { return fmt::format("data: {}\n\n", data); }

std::string named_event(const Json& event) {
  return fmt::format("event: {}\ndata: {}\n\n", event.find("type")->as_string(), event.dump());
}

std::string ChunkFormat::whole_body(const std::vector<Choice>& choices, const Usage& total) {
  Json answer = whole(choices);
  token_ids_.add_to(answer, choices);
  answer.set("usage", usage_json(total));
  return answer.dump();
}

std::string ChunkFormat::stream_begin(const Choice& choice) {
  return framed(choice, opening(choice));
}

std::string ChunkFormat::stream_piece(const Choice& choice,
                                      const AnswerPiece& piece,
                                      int64_t call) {
  if (!is_text_alone(choice, piece)) {
    return framed(choice, delta(choice, piece, call));
  }
  const TextFrame& frame = text_frame(choice);
  std::string out = frame.before;
  append_json_string(out, piece.text);
  return out += frame.behind;
}

bool ChunkFormat::is_text_alone(const Choice& choice, const AnswerPiece& piece) const {
  return piece.kind == AnswerPiece::Kind::kContent && choice.entries.empty() &&
         choice.finish_reason.empty() && !choice.text.stopped() && !continuous_usage_ &&
         !token_ids_.wanted();
}

const ChunkFormat::TextFrame& ChunkFormat::text_frame(const Choice& choice) {
  TextFrame& frame = text_frames_[choice.index];
  if (frame.before.empty()) {
    const AnswerPiece mark = {AnswerPiece::Kind::kContent, "\x1f"};
    const std::string_view written = R"("\u001f")";
    const std::string event = framed(choice, delta(choice, mark, 0));
    const size_t at = event.rfind(written);
    CHECK(at != std::string::npos);
    frame = {event.substr(0, at), event.substr(at + written.size())};
  }
  return frame;
}

std::string ChunkFormat::stream_choice_end(const Choice& choice) {
  return framed(choice, end(choice));
}

std::string ChunkFormat::stream_end(const Usage& total) {
  std::string out;
  if (include_usage_) {
    Json event = usage_only();
    event.set("usage", usage_json(total));
    out = data_event(event.dump());
  }
  return out + data_event("[DONE]");
}

std::string ChunkFormat::stream_failure(const ApiError& error) {
  return data_event(error_json(error)) + data_event("[DONE]");
}

std::string ChunkFormat::framed(const Choice& choice, Json event) {
  if (event.is_null()) {
    return {};
  }
  token_ids_.add_new_to(event, choice);
  if (continuous_usage_) {
    event.set("usage", usage_json(choice.usage));
  } else if (include_usage_) {
    event.set("usage", Json());
  }
  return data_event(event.dump());
}

}  // namespace nibble
