#include "text/tokenizer.h"

#include <algorithm>

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

void Tokenizer::encode_section(std::string_view section,
                               SectionPlace place,
                               SpecialTokens mode,
                               std::vector<int32_t>& ids) const {
  std::string normalized;
  if (!parts_.normalizer.empty()) {
    normalized = parts_.normalizer.apply(section, place);
    section = normalized;
  }
  normalized_matcher_.split(
      section, mode,
      [&](std::string_view text) {
        parts_.pre_tokenizer.for_each_word(
            text, place, [&](std::string_view word) { parts_.model->encode(word, ids); });
        place = SectionPlace::kLater;
      },
      [&](int32_t id) {
        ids.push_back(id);
        place = SectionPlace::kLater;
      });
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialTokens mode) const {
  std::string repaired;
  if (!utf8_valid(text)) {
    repaired = utf8_repaired(text);
    text = repaired;
  }
  std::vector<int32_t> ids;
  SectionPlace place = SectionPlace::kTextStart;
  raw_matcher_.split(
      text, mode,
      [&](std::string_view section) {
        encode_section(section, place, mode, ids);
        place = SectionPlace::kLater;
      },
      [&](int32_t id) {
        ids.push_back(id);
        place = SectionPlace::kLater;
      });
  return ids;
}

std::vector<int32_t> Tokenizer::encode_prompt(std::string_view text) const {
  std::vector<int32_t> ids = parts_.prompt_prefix;
  const std::vector<int32_t> rest = encode(text, SpecialTokens::kParse);
  ids.insert(ids.end(), rest.begin(), rest.end());
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
