#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace nibble {

/// A token that is found in the text itself, before the model sees it (tokenizer.json's
/// added_tokens, added_tokens_decoder of tokenizer_config.json).
struct AddedToken {
  int32_t id = 0;
  std::string content;
  std::string pattern;       // what is searched for, if that is not the content
  bool special = false;      // control token: parsed on request only, left out of plain output
  bool normalized = false;   // found in the normalized text, else in the text as given
  bool single_word = false;  // only between characters that are no word characters
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
};

/// Which added tokens count.
enum class SpecialTokens {
  kParse,  // all of them
  kPlain,  // the special ones are ordinary text, as for text from users
};

/// Finds added tokens: leftmost first, the longest of those. Immutable, thread-safe.
class AddedTokenMatcher final {
 public:
  using TextVisitor = std::function<Status(std::string_view text)>;
  using TokenVisitor = std::function<void(int32_t id)>;

  void add(const AddedToken& token);
  [[nodiscard]] bool empty() const { return nodes_.size() == 1; }

  /// Visits `text` (valid UTF-8) from left to right as tokens and the stretches between them, which
  /// are never empty. Errors: the first that `visit_text` returns, which ends the visits.
  Status split(std::string_view text,
               SpecialTokens mode,
               const TextVisitor& visit_text,
               const TokenVisitor& visit_token) const;

 private:
  struct Node {
    std::vector<std::pair<char, uint32_t>> children;
    int32_t token = -1;  // index into tokens_
  };

  [[nodiscard]] const AddedToken* match_at(std::string_view text,
                                           size_t begin,
                                           SpecialTokens mode) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_ = std::vector<Node>(1);  // a trie over bytes; the root is node 0
};

}  // namespace nibble
