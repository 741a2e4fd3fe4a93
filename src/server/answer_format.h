#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "server/choice.h"
#include "server/error.h"
#include "server/schema.h"
#include "server/token_ids.h"

namespace nibble {

/// How a route words its answers: whole, or as the bytes of a stream of server-sent events. Of a
/// stream, "" says that there is nothing to send.
class AnswerFormat {
 public:
  virtual ~AnswerFormat() = default;
  /// The body of a whole answer, called once. `total` is the usage of all choices.
  [[nodiscard]] virtual std::string whole_body(const std::vector<Choice>& choices,
                                               const Usage& total) = 0;
  /// Whether a stream begins before there is a token. Clients that measure take the first event of
  /// a chat for its first token.
  [[nodiscard]] virtual bool begins_at_once() const { return true; }
  /// What a choice begins with.
  [[nodiscard]] virtual std::string stream_begin(const Choice& choice) = 0;
  /// New text of a choice; a call as it begins, its arguments (call: its place among the calls).
  [[nodiscard]] virtual std::string stream_piece(const Choice& choice,
                                                 const AnswerPiece& piece,
                                                 int64_t call) = 0;
  /// Says why a choice ended.
  [[nodiscard]] virtual std::string stream_choice_end(const Choice& choice) = 0;
  /// What comes behind the last choice.
  [[nodiscard]] virtual std::string stream_end(const Usage& total) = 0;
  /// Ends a stream that failed.
  [[nodiscard]] virtual std::string stream_failure(const ApiError& error) = 0;
};

/// The event of OpenAI's chats and completions: without a name.
[[nodiscard]] std::string data_event(std::string_view data);
/// An event with a name, which is the member "type" of its object.
[[nodiscard]] std::string named_event(const Json& event);

/// Chunks as OpenAI's chats and completions have them; JSON texts are whole objects.
class ChunkFormat : public AnswerFormat {
 public:
  explicit ChunkFormat(const GenerationRequest& request)
      : include_usage_(request.include_usage),
        continuous_usage_(request.continuous_usage),
        token_ids_(request) {}

  [[nodiscard]] std::string whole_body(const std::vector<Choice>& choices,
                                       const Usage& total) final;
  [[nodiscard]] bool begins_at_once() const final { return false; }
  [[nodiscard]] std::string stream_begin(const Choice& choice) final;
  [[nodiscard]] std::string stream_piece(const Choice& choice,
                                         const AnswerPiece& piece,
                                         int64_t call) final;
  [[nodiscard]] std::string stream_choice_end(const Choice& choice) final;
  [[nodiscard]] std::string stream_end(const Usage& total) final;
  [[nodiscard]] std::string stream_failure(const ApiError& error) final;

 protected:
  /// Members of the envelope: id, object, created, model, then `choices`.
  [[nodiscard]] virtual Json whole(const std::vector<Choice>& choices) const = 0;
  /// The first event of a choice; null if the route has none.
  [[nodiscard]] virtual Json opening(const Choice& choice) const = 0;
  /// Null for a piece that the route does not show.
  [[nodiscard]] virtual Json delta(const Choice& choice,
                                   const AnswerPiece& piece,
                                   int64_t call) const = 0;
  /// The event that says why a choice ended.
  [[nodiscard]] virtual Json end(const Choice& choice) const = 0;
  /// An event without choices, to carry the usage.
  [[nodiscard]] virtual Json usage_only() const = 0;

 private:
  /// The event of a piece of content that nothing else goes with, in front of its text and behind.
  struct TextFrame {
    std::string before, behind;
  };

  [[nodiscard]] std::string framed(const Choice& choice, Json event);
  [[nodiscard]] bool is_text_alone(const Choice& choice, const AnswerPiece& piece) const;
  [[nodiscard]] const TextFrame& text_frame(const Choice& choice);

  bool include_usage_, continuous_usage_;
  TokenIds token_ids_;
  std::unordered_map<int64_t, TextFrame> text_frames_;  // by choice
};

}  // namespace nibble
