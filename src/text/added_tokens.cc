#include "text/added_tokens.h"

#include <algorithm>
#include <cctype>

#include <utf8proc.h>

#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

// Start of the character that ends just before `end`.
size_t character_before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

bool is_word_character(std::string_view character) {
  const char32_t c = utf8_decode(character);
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

bool is_space(std::string_view character) {
  const char32_t c = utf8_decode(character);
  if (c < 0x80) {
    return c == ' ' || (c >= 0x09 && c <= 0x0D);
  }
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return c == 0x85 || category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

const std::string& searched(const AddedToken& token) {
  return token.pattern.empty() ? token.content : token.pattern;
}

bool stands_alone(std::string_view text, size_t begin, size_t end) {
  if (begin > 0) {
    const size_t before = character_before(text, begin);
    if (is_word_character(text.substr(before, begin - before))) return false;
  }
  return end >= text.size() || !is_word_character(text.substr(end, utf8_step(text, end).length));
}

}  // namespace

void AddedTokenMatcher::add(const AddedToken& token) {
  if (searched(token).empty()) {
    return;
  }
  uint32_t node = 0;
  for (const char c : searched(token)) {
    const auto& children = nodes_[node].children;
    const auto child = std::find_if(children.begin(), children.end(),
                                    [c](const auto& entry) { return entry.first == c; });
    if (child != children.end()) {
      node = child->second;
      continue;
    }
    const auto fresh = static_cast<uint32_t>(nodes_.size());
    nodes_[node].children.emplace_back(c, fresh);
    nodes_.emplace_back();
    node = fresh;
  }
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

const AddedToken* AddedTokenMatcher::match_at(std::string_view text,
                                              size_t begin,
                                              SpecialTokens mode) const {
  const AddedToken* longest = nullptr;
  uint32_t node = 0;
  for (size_t at = begin; at < text.size(); ++at) {
    const auto& children = nodes_[node].children;
    const auto child = std::find_if(children.begin(), children.end(),
                                    [&](const auto& entry) { return entry.first == text[at]; });
    if (child == children.end()) break;
    node = child->second;
    if (nodes_[node].token < 0) continue;
    const AddedToken& token = tokens_[static_cast<size_t>(nodes_[node].token)];
    const bool wanted = mode == SpecialTokens::kParse || !token.special;
    if (wanted && (!token.single_word || stands_alone(text, begin, at + 1))) {
      longest = &token;
    }
  }
  return longest;
}

Status AddedTokenMatcher::split(std::string_view text,
                                SpecialTokens mode,
                                const TextVisitor& visit_text,
                                const TokenVisitor& visit_token) const {
  size_t covered = 0;
  size_t at = 0;
  while (!empty() && at < text.size()) {
    const AddedToken* token = match_at(text, at, mode);
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + searched(*token).size();
    while (token->lstrip && begin > covered) {
      const size_t before = character_before(text, begin);
      if (before < covered || !is_space(text.substr(before, begin - before))) break;
      begin = before;
    }
    while (token->rstrip && end < text.size()) {
      const size_t length = utf8_step(text, end).length;
      if (!is_space(text.substr(end, length))) break;
      end += length;
    }
    if (begin > covered) {
      NIBBLE_RETURN_IF_ERROR(visit_text(text.substr(covered, begin - covered)));
    }
    visit_token(token->id);
    covered = end;
    at = end;
  }
  return covered < text.size() ? visit_text(text.substr(covered)) : Status();
}

}  // namespace nibble
