#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "text/pretokenizer.h"
#include "text/tokenizer_regex.h"

namespace nibble {

/// Unicode normalization by utf8proc.
struct UnicodeStep {
  enum class Form { kNfc, kNfd, kNfkc, kNfkd };
  Form form = Form::kNfc;
};

/// Puts `text` before a section that is not empty.
struct PrependStep {
  std::string text;
  PrependScheme scheme = PrependScheme::kAlways;
};

/// Replaces every occurrence of `from`.
struct ReplaceTextStep {
  std::string from;
  std::string to;
};

/// Replaces every match of `pattern`.
struct ReplacePatternStep {
  Regex pattern;
  std::string to;
};

/// Removes white space at the ends of a section.
struct StripStep {
  bool left = true;
  bool right = true;
};

/// Rewrites text before it is cut into words. Immutable, thread-safe.
class Normalizer final {
 public:
  using Step =
      std::variant<UnicodeStep, PrependStep, ReplaceTextStep, ReplacePatternStep, StripStep>;

  /// Appends a step, one of the alternatives of Step.
  template <typename T>
  void add(T step) {
    steps_.emplace_back(std::in_place_type<T>, std::move(step));
  }
  [[nodiscard]] bool empty() const { return steps_.empty(); }

  /// A text (valid UTF-8) after all steps, in order. Errors: those of Regex::for_each_match.
  [[nodiscard]] Result<std::string> apply(TextPart part, SectionPlace place) const;

 private:
  std::vector<Step> steps_;
};

/// `text` with every occurrence of `from` (not empty) replaced by `to`.
[[nodiscard]] std::string replace_all(std::string_view text,
                                      std::string_view from,
                                      std::string_view to);

}  // namespace nibble
