#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "text/tokenizer_regex.h"

namespace nibble {

/// Whether a section is the beginning of the whole text or follows an added token.
enum class SectionPlace { kTextStart, kLater };

/// What happens with the matches of a splitting pattern (names as in tokenizer.json).
enum class SplitBehavior {
  kIsolated,
  kRemoved,
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous,
};

/// When a space marker is put before a section.
enum class PrependScheme { kAlways, kFirst, kNever };

/// Cuts text at the matches of a pattern.
struct SplitStep {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // the stretches between matches count as matches, and the reverse
};

/// Replaces spaces by `marker` (U+2581 in published models) and cuts before each marker.
struct MetaspaceStep {
  std::string marker;
  PrependScheme prepend = PrependScheme::kAlways;
  bool split = true;
};

/// Puts a space before a word that does not begin with one (ByteLevel's add_prefix_space).
struct PrefixSpaceStep {};

/// Cuts normalized text into words, inside which the model merges. Immutable, thread-safe.
class PreTokenizer final {
 public:
  using Step = std::variant<SplitStep, MetaspaceStep, PrefixSpaceStep>;
  using WordVisitor = std::function<void(std::string_view word)>;

  /// Appends a step, one of the alternatives of Step.
  template <typename T>
  void add(T step) {
    steps_.emplace_back(std::in_place_type<T>, std::move(step));
  }

  /// Visits the words of a text (valid UTF-8) in order; each step works on the words of the step
  /// before. Empty words are dropped. A word is valid only during its visit.
  /// Errors: those of Regex::for_each_match.
  Status for_each_word(TextPart part, SectionPlace place, const WordVisitor& visit) const;

 private:
  std::vector<Step> steps_;
};

/// Cuts a text as `step` says and visits the pieces that are not empty.
/// Errors: those of Regex::for_each_match.
Status split_text(const SplitStep& step, TextPart part, const PreTokenizer::WordVisitor& visit);

/// Pattern that tokenizer files imply by name: "gpt2" (ByteLevel's own), "llama3", "qwen2",
/// "o200k", "kimi_k2", "cl100k", "tekken". Empty for another name.
[[nodiscard]] std::string_view known_split_pattern(std::string_view name);

}  // namespace nibble
