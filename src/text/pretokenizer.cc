#include "text/pretokenizer.h"

#include <deque>

namespace nibble {
namespace {

struct Stretch {
  size_t begin;
  size_t end;
  bool is_match;
};

// The whole text as alternating matches and stretches between them.
Result<std::vector<Stretch>> stretches(const SplitStep& step, TextPart part) {
  std::vector<Stretch> out;
  size_t covered = 0;
  const auto put = [&](size_t begin, size_t end, bool is_match) {
    if (begin < end) out.push_back({begin, end, is_match != step.invert});
  };
  NIBBLE_RETURN_IF_ERROR(step.pattern.for_each_match(part, [&](size_t begin, size_t end) {
    put(covered, begin, false);
    put(begin, end, true);
    covered = end;
  }));
  put(covered, part.text.size(), false);
  return out;
}

// Joins neighbours of `parts` as the behavior asks.
std::vector<Stretch> joined(const std::vector<Stretch>& parts, SplitBehavior behavior) {
  std::vector<Stretch> out;
  for (const Stretch& part : parts) {
    bool join = false;
    if (!out.empty()) {
      const Stretch& last = out.back();
      switch (behavior) {
        case SplitBehavior::kContiguous:
          join = last.is_match == part.is_match;
          break;
        case SplitBehavior::kMergedWithPrevious:
          join = part.is_match && !last.is_match;
          break;
        case SplitBehavior::kMergedWithNext:
          join = last.is_match && !part.is_match;
          break;
        case SplitBehavior::kIsolated:
        case SplitBehavior::kRemoved:
          break;
      }
    }
    if (join) {
      out.back().end = part.end;
      out.back().is_match = part.is_match;
    } else if (behavior != SplitBehavior::kRemoved || !part.is_match) {
      out.push_back(part);
    }
  }
  return out;
}

struct Word {
  std::string_view text;
  SectionPlace place;
  size_t at;  // where it begins in the whole text; for words that a step wrote, about where
};

// Words of one step and the texts that the step had to write itself.
class WordList final {
 public:
  std::vector<Word> words;

  std::string_view keep(std::string text) { return owned_.emplace_back(std::move(text)); }

 private:
  std::deque<std::string> owned_;
};

Status apply(const SplitStep& step, const std::vector<Word>& in, WordList& out) {
  for (const Word& word : in) {
    SectionPlace place = word.place;
    NIBBLE_RETURN_IF_ERROR(split_text(step, {word.text, word.at}, [&](std::string_view piece) {
      const auto offset = static_cast<size_t>(piece.data() - word.text.data());
      out.words.push_back({piece, place, word.at + offset});
      place = SectionPlace::kLater;
    }));
  }
  return {};
}

Status apply(const MetaspaceStep& step, const std::vector<Word>& in, WordList& out) {
  for (const Word& word : in) {
    std::string marked;
    for (const char c : word.text) {
      if (c == ' ') {
        marked += step.marker;
      } else {
        marked += c;
      }
    }
    const bool prepend =
        step.prepend == PrependScheme::kAlways ||
        (step.prepend == PrependScheme::kFirst && word.place == SectionPlace::kTextStart);
    if (prepend && !marked.starts_with(step.marker)) {
      marked.insert(0, step.marker);
    }
    const std::string_view text = out.keep(std::move(marked));
    size_t begin = 0;
    while (begin < text.size()) {
      const size_t next = step.split ? text.find(step.marker, begin + 1) : std::string_view::npos;
      const size_t end = next == std::string_view::npos ? text.size() : next;
      out.words.push_back({text.substr(begin, end - begin), word.place, word.at});
      begin = end;
    }
  }
  return {};
}

Status apply(const PrefixSpaceStep& /*step*/, const std::vector<Word>& in, WordList& out) {
  for (const Word& word : in) {
    out.words.push_back(word.text.starts_with(' ')
                            ? word
                            : Word{out.keep(" " + std::string(word.text)), word.place, word.at});
  }
  return {};
}

}  // namespace

Status split_text(const SplitStep& step, TextPart part, const PreTokenizer::WordVisitor& visit) {
  const std::string_view text = part.text;
  if (step.behavior == SplitBehavior::kIsolated) {
    size_t covered = 0;
    NIBBLE_RETURN_IF_ERROR(step.pattern.for_each_match(part, [&](size_t begin, size_t end) {
      if (begin > covered) visit(text.substr(covered, begin - covered));
      visit(text.substr(begin, end - begin));
      covered = end;
    }));
    if (covered < text.size()) visit(text.substr(covered));
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Stretch> found, stretches(step, part));
  for (const Stretch& stretch : joined(found, step.behavior)) {
    visit(text.substr(stretch.begin, stretch.end - stretch.begin));
  }
  return {};
}

Status PreTokenizer::for_each_word(TextPart part,
                                   SectionPlace place,
                                   const WordVisitor& visit) const {
  if (part.text.empty()) {
    return {};
  }
  if (steps_.size() == 1 && std::holds_alternative<SplitStep>(steps_[0])) {
    return split_text(std::get<SplitStep>(steps_[0]), part, visit);
  }
  std::deque<WordList> lists(1);
  lists[0].words.push_back({part.text, place, part.at});
  for (const Step& step : steps_) {
    WordList& next = lists.emplace_back();
    const std::vector<Word>& previous = lists[lists.size() - 2].words;
    NIBBLE_RETURN_IF_ERROR(
        std::visit([&](const auto& concrete) { return apply(concrete, previous, next); }, step));
  }
  for (const Word& word : lists.back().words) {
    visit(word.text);
  }
  return {};
}

std::string_view known_split_pattern(std::string_view name) {
  // Written in the dialect of the files; translate_regex turns them into PCRE2.
  if (name == "gpt2") {
    return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
  }
  if (name == "llama3" || name == "cl100k") {
    return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
           R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  if (name == "qwen2") {
    return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
           R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  if (name == "o200k") {
    return R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
           R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
           R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
           R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
           R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  if (name == "tekken") {
    return R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
           R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
           R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  if (name == "kimi_k2") {
    return R"([\p{Han}]+)"
           R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
           R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
           R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
           R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
           R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  return {};
}

}  // namespace nibble
