#include "text/tokenizer_normalizer.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include <utf8proc.h>

#include "base/check.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

// What a step knows of the text around.
struct Section {
  SectionPlace place;
  size_t at;  // see TextPart
};

std::string apply(const UnicodeStep& step, std::string text, Section /*section*/) {
  using Form = UnicodeStep::Form;
  // Nothing below U+0300 is changed by NFC, and nothing in ASCII by any form; utf8proc is slow.
  const uint8_t unchanged_below = step.form == Form::kNfc ? 0xCC : 0x80;
  if (std::all_of(text.begin(), text.end(), [=](char c) {
        const auto byte = static_cast<uint8_t>(c);
        return byte < unchanged_below;
      })) {
    return text;
  }
  int options = UTF8PROC_STABLE;
  options |=
      step.form == Form::kNfc || step.form == Form::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (step.form == Form::kNfkc || step.form == Form::kNfkd) {
    options |= UTF8PROC_COMPAT;
  }
  utf8proc_uint8_t* mapped = nullptr;
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             static_cast<utf8proc_ssize_t>(text.size()), &mapped,
                                             static_cast<utf8proc_option_t>(options));
  CHECK_MSG(size >= 0, "utf8proc refuses valid UTF-8: {}", utf8proc_errmsg(size));
  std::string out(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size));
  std::free(mapped);
  return out;
}

std::string apply(const PrependStep& step, std::string text, Section section) {
  const bool wanted =
      step.scheme == PrependScheme::kAlways ||
      (step.scheme == PrependScheme::kFirst && section.place == SectionPlace::kTextStart);
  return wanted && !text.empty() ? step.text + text : text;
}

std::string apply(const ReplaceTextStep& step, std::string text, Section /*section*/) {
  return replace_all(text, step.from, step.to);
}

Result<std::string> apply(const ReplacePatternStep& step, std::string text, Section section) {
  std::string out;
  size_t covered = 0;
  const auto replace = [&](size_t begin, size_t end) {
    out.append(text, covered, begin - covered);
    out += step.to;
    covered = end;
  };
  NIBBLE_RETURN_IF_ERROR(step.pattern.for_each_match({text, section.at}, replace));
  out.append(text, covered);
  return out;
}

bool is_space(std::string_view character) {
  const char32_t c = utf8_decode(character);
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

std::string apply(const StripStep& step, std::string text, Section /*section*/) {
  size_t begin = text.size();
  size_t end = 0;
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_step(text, i).length;
    if (!is_space(std::string_view(text).substr(i, length))) {
      begin = std::min(begin, i);
      end = i + length;
    }
    i += length;
  }
  if (begin >= end) {
    return step.left || step.right ? std::string() : text;
  }
  return text.substr(step.left ? begin : 0,
                     (step.right ? end : text.size()) - (step.left ? begin : 0));
}

}  // namespace

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  CHECK_MSG(!from.empty(), "replace_all: nothing to look for");
  std::string out;
  size_t covered = 0;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from, covered)) {
    out += text.substr(covered, at - covered);
    out += to;
    covered = at + from.size();
  }
  out += text.substr(covered);
  return out;
}

Result<std::string> Normalizer::apply(TextPart part, SectionPlace place) const {
  std::string current(part.text);
  const Section section{place, part.at};
  for (const Step& step : steps_) {
    const auto apply_step = [&](const auto& concrete) -> Result<std::string> {
      return nibble::apply(concrete, std::move(current), section);
    };
    NIBBLE_ASSIGN_OR_RETURN(current, std::visit(apply_step, step));
  }
  return current;
}

}  // namespace nibble
