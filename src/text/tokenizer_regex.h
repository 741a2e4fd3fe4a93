#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// Rewrites a pattern of the dialect that tokenizer files use (Oniguruma, Rust's regex and
/// fancy-regex) into PCRE2 with the same meaning:
/// - `\s` and `\S` become explicit lists, because PCRE2 counts U+180E as white space;
/// - `\p{Han}` becomes `\p{sc:Han}`, because PCRE2 reads the short form as script extensions;
/// - `[A&&[B]]` and `[A&&[^B]]` become a lookahead before `[A]`, because PCRE2 has no class
///   intersection and would silently read another class.
/// Errors: kUnsupported for a nested class that is no intersection, kCorrupt for an open class.
[[nodiscard]] Result<std::string> translate_regex(std::string_view pattern);

/// A stretch of a text that is worked on, and where it begins in that text, in bytes: for messages.
struct TextPart {
  std::string_view text;
  size_t at = 0;
};

/// A compiled Unicode regular expression. Immutable and safe to share between threads.
class Regex final {
 public:
  /// Called with the byte range [begin, end) of a match.
  using MatchVisitor = std::function<void(size_t begin, size_t end)>;

  /// Compiles `pattern` after translate_regex. `where` names the file and field for errors.
  static Result<Regex> compile(std::string_view pattern, std::string_view where);

  /// Visits all matches that are not empty, from left to right. The text is valid UTF-8. Linear for
  /// the patterns of published tokenizers, which need no more than the 512 MB stack for words of
  /// 16 MiB; a match that exhausts it is retried without JIT.
  /// Errors: kInvalidArgument, with the pattern's `where` and the position in the text, when a
  /// match takes more steps than is bearable. What was visited before is then good for nothing.
  Status for_each_match(TextPart part, const MatchVisitor& visit) const;

 private:
  struct Code;
  explicit Regex(std::shared_ptr<const Code> code) : code_(std::move(code)) {}

  std::shared_ptr<const Code> code_;
};

}  // namespace nibble
