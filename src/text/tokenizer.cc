#include "text/tokenizer.h"

#include <algorithm>
#include <utility>

#include "text/detokenizer.h"
#include "text/tokenizer_utf8.h"

namespace nibble {

Result<std::unique_ptr<Tokenizer>> Tokenizer::create(TokenizerParts parts) {
  if (!parts.model) {
    return make_error(StatusCode::kCorrupt, "tokenizer: no model among its parts");
  }
  if (parts.token_bytes.size() > size_t{1} << 21) {
    return make_error(StatusCode::kCorrupt, "tokenizer: {} token ids are more than 2^21",
                      parts.token_bytes.size());
  }
  const auto known = [&](int32_t id) {
    return id >= 0 && static_cast<size_t>(id) < parts.token_bytes.size();
  };
  for (const AddedToken& token : parts.added_tokens) {
    if (!known(token.id)) {
      return make_error(StatusCode::kCorrupt,
                        "tokenizer: added token '{}' has id {} outside [0, {})", token.content,
                        token.id, parts.token_bytes.size());
    }
  }
  for (const int32_t id : parts.prompt_prefix) {
    if (!known(id)) {
      return make_error(StatusCode::kCorrupt, "tokenizer: prompt prefix has id {} outside [0, {})",
                        id, parts.token_bytes.size());
    }
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(parts)));
}

Tokenizer::Tokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
  special_.assign(parts_.token_bytes.size(), 0);
  for (const AddedToken& token : parts_.added_tokens) {
    (token.normalized ? normalized_matcher_ : raw_matcher_).add(token);
    added_ids_.emplace(token.content, token.id);
    if (token.special) special_[static_cast<size_t>(token.id)] = 1;
  }
  ids_by_bytes_.reserve(parts_.token_bytes.size());
  for (size_t id = 0; id < parts_.token_bytes.size(); ++id) {
    if (!parts_.token_bytes[id].empty()) {
      ids_by_bytes_.emplace(parts_.token_bytes[id], static_cast<int32_t>(id));
    }
  }
}

Status Tokenizer::encode_section(TextPart section,
                                 SectionPlace place,
                                 SpecialTokens mode,
                                 std::vector<int32_t>& ids) const {
  std::string normalized;
  std::string_view whole = section.text;
  if (!parts_.normalizer.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(normalized, parts_.normalizer.apply(section, place));
    whole = normalized;
  }
  return normalized_matcher_.split(
      whole, mode,
      [&](std::string_view text) {
        const size_t at = section.at + static_cast<size_t>(text.data() - whole.data());
        return parts_.pre_tokenizer.for_each_word(
            {text, at}, std::exchange(place, SectionPlace::kLater),
            [&](std::string_view word) { parts_.model->encode(word, ids); });
      },
      [&](int32_t id) {
        ids.push_back(id);
        place = SectionPlace::kLater;
      });
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, SpecialTokens mode) const {
  std::string repaired;
  if (!utf8_valid(text)) {
    repaired = utf8_repaired(text);
    text = repaired;
  }
  std::vector<int32_t> ids;
  SectionPlace place = SectionPlace::kTextStart;
  NIBBLE_RETURN_IF_ERROR(raw_matcher_.split(
      text, mode,
      [&](std::string_view section) {
        const auto at = static_cast<size_t>(section.data() - text.data());
        return encode_section({section, at}, std::exchange(place, SectionPlace::kLater), mode, ids);
      },
      [&](int32_t id) {
        ids.push_back(id);
        place = SectionPlace::kLater;
      }));
  return ids;
}

Result<std::vector<int32_t>> Tokenizer::encode_prompt(std::string_view text) const {
  NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, encode(text, SpecialTokens::kParse));
  ids.insert(ids.begin(), parts_.prompt_prefix.begin(), parts_.prompt_prefix.end());
  return ids;
}

const std::string& Tokenizer::token_bytes(int32_t id) const {
  static const std::string kUnused;
  return id >= 0 && id < vocab_size() ? parts_.token_bytes[static_cast<size_t>(id)] : kUnused;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, DecodeSpecials specials) const {
  Detokenizer detokenizer(*this, specials);
  std::string text;
  for (const int32_t id : ids) {
    text += detokenizer.push(id);
  }
  return text + detokenizer.flush();
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(parts_.token_bytes.size()); }

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && special_[static_cast<size_t>(id)] != 0;
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  if (const auto added = added_ids_.find(std::string(token)); added != added_ids_.end()) {
    return added->second;
  }
  const auto found = ids_by_bytes_.find(token);
  return found == ids_by_bytes_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace nibble
