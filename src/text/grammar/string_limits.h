#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nibble {

/// Follows JSON text byte by byte: whether it is within a string, and how many characters of it
/// came. An escape is one character, counted at its backslash.
struct StringPosition {
  bool inside = false;
  bool escaped = false;  // a backslash came
  int hex_left = 0;      // of \uXXXX
  int64_t characters = 0;

  void push(char byte);
};

/// What tokens do to strings of JSON, for all of a vocabulary: made once. Immutable.
class TokenStrings final {
 public:
  explicit TokenStrings(std::span<const std::string> tokens);

  /// Clears tokens that would make the string longer than `limit` characters (none: no limit), and
  /// those that begin another string with more than `shortest` characters in one token.
  void clear_long(const StringPosition& at,
                  std::optional<int64_t> limit,
                  int64_t shortest,
                  std::span<uint32_t> mask) const;
  [[nodiscard]] std::string_view bytes(int32_t token) const;
  [[nodiscard]] int64_t size() const { return std::ssize(tokens_); }

 private:
  using Counted = std::vector<std::pair<int64_t, int32_t>>;  // characters and token, most first

  std::vector<std::string> tokens_;
  Counted added_;         // to the string that a token begins in
  Counted opened_;        // in strings that a token opens where it begins outside
  Counted opened_after_;  // and where it begins within one
};

/// Keeps the strings of one answer within the limits of their rules.
class StringLimits final {
 public:
  /// `shortest` is the smallest limit of the grammar. `tokens` outlives this.
  StringLimits(const TokenStrings& tokens, int64_t shortest)
      : tokens_(tokens), shortest_(shortest) {}

  /// After each token: `limit` is that of the string which the grammar is in.
  void accept(int32_t token, std::optional<int64_t> limit);
  void apply(std::span<uint32_t> mask) const { tokens_.clear_long(at_, limit_, shortest_, mask); }

 private:
  const TokenStrings& tokens_;
  const int64_t shortest_;
  StringPosition at_;
  std::optional<int64_t> limit_;
};

}  // namespace nibble
