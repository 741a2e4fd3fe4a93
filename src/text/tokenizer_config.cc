#include <algorithm>
#include <charconv>

#include "text/tokenizer_loaders.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

// bos_token and its like: null, a string, or an object with the string in "content".
Result<std::string> token_text(const Json& config, std::string_view field, std::string_view where) {
  const Json* value = config.find(field);
  if (value != nullptr && value->is_object()) {
    value = value->find("content");
    if (value == nullptr) {
      return make_error(StatusCode::kCorrupt, "{}: field {}: the object has no content", where,
                        field);
    }
  }
  if (value == nullptr || value->is_null()) {
    return std::string();
  }
  if (!value->is_string()) {
    return make_error(StatusCode::kCorrupt, "{}: field {}: expected a string, an object or null",
                      where, field);
  }
  return value->as_string();
}

Status parse_added_tokens(const Json& decoder, std::string_view where, TokenizerConfig& config) {
  if (!decoder.is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: field added_tokens_decoder: expected an object",
                      where);
  }
  for (const auto& [key, value] : decoder.as_object()) {
    const std::string place = fmt::format("{}: field added_tokens_decoder.{}", where, key);
    NIBBLE_ASSIGN_OR_RETURN(AddedToken token, parse_added_token(value, place));
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token.id);
    if (error != std::errc() || end != key.data() + key.size()) {
      return make_error(StatusCode::kCorrupt, "{}: the name is no token id", place);
    }
    config.added_tokens.push_back(std::move(token));
  }
  return {};
}

std::optional<int32_t> find_token(const TokenizerParts& parts, std::string_view text) {
  for (const AddedToken& token : parts.added_tokens) {
    if (token.content == text) return token.id;
  }
  const auto found = std::find(parts.token_bytes.begin(), parts.token_bytes.end(), text);
  return found == parts.token_bytes.end()
             ? std::nullopt
             : std::optional(static_cast<int32_t>(found - parts.token_bytes.begin()));
}

}  // namespace

Result<TokenizerConfig> TokenizerConfig::parse(std::string_view json_text, std::string_view where) {
  Result<Json> parsed = Json::parse(json_text);
  if (!parsed.ok()) {
    return parsed.status().with_context(where);
  }
  if (!parsed->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: expected an object", where);
  }
  const JsonReader reader(*parsed, std::string(where));
  TokenizerConfig config;
  NIBBLE_ASSIGN_OR_RETURN(config.tokenizer_class, reader.optional_string("tokenizer_class", ""));
  NIBBLE_ASSIGN_OR_RETURN(config.bos_token, token_text(*parsed, "bos_token", where));
  NIBBLE_ASSIGN_OR_RETURN(config.eos_token, token_text(*parsed, "eos_token", where));
  NIBBLE_ASSIGN_OR_RETURN(config.legacy, reader.optional_bool("legacy", true));
  if (const Json* add_bos = parsed->find("add_bos_token"); add_bos && !add_bos->is_null()) {
    NIBBLE_ASSIGN_OR_RETURN(config.add_bos_token, reader.optional_bool("add_bos_token", false));
  }
  if (const Json* decoder = parsed->find("added_tokens_decoder"); decoder && !decoder->is_null()) {
    NIBBLE_RETURN_IF_ERROR(parse_added_tokens(*decoder, where, config));
  }
  return config;
}

Result<AddedToken> parse_added_token(const Json& json, const std::string& where) {
  const JsonReader reader(json, where);
  AddedToken token;
  NIBBLE_ASSIGN_OR_RETURN(token.content, reader.required_string("content"));
  NIBBLE_ASSIGN_OR_RETURN(token.special, reader.optional_bool("special", false));
  NIBBLE_ASSIGN_OR_RETURN(token.normalized, reader.optional_bool("normalized", !token.special));
  NIBBLE_ASSIGN_OR_RETURN(token.single_word, reader.optional_bool("single_word", false));
  NIBBLE_ASSIGN_OR_RETURN(token.lstrip, reader.optional_bool("lstrip", false));
  NIBBLE_ASSIGN_OR_RETURN(token.rstrip, reader.optional_bool("rstrip", false));
  return token;
}

Status put_added_token(const AddedToken& token, TokenizerParts& parts) {
  if (token.id < 0 || token.id >= kTokenIdLimit) {
    return make_error(StatusCode::kCorrupt, "added token '{}': id {} is outside [0, {})",
                      token.content, token.id, kTokenIdLimit);
  }
  const auto same =
      std::find_if(parts.added_tokens.begin(), parts.added_tokens.end(),
                   [&](const AddedToken& other) { return other.content == token.content; });
  if (same != parts.added_tokens.end() && same->id != token.id && !token.content.empty()) {
    return make_error(StatusCode::kCorrupt, "added token '{}' has two ids, {} and {}",
                      token.content, same->id, token.id);
  }
  const auto index = static_cast<size_t>(token.id);
  if (parts.token_bytes.size() <= index) {
    parts.token_bytes.resize(index + 1);
  }
  parts.token_bytes[index] = token.content;
  if (same == parts.added_tokens.end()) {
    parts.added_tokens.push_back(token);
  } else {
    *same = token;
  }
  return {};
}

Status list_added_token(const AddedToken& token, VocabularyNames& names, TokenizerParts& parts) {
  // Some lists have the text of a token, others its name in the vocabulary ("  " for "▁▁").
  const auto index = static_cast<size_t>(token.id);
  const bool same_text = token.id >= 0 && index < parts.token_bytes.size() &&
                         !token.content.empty() && parts.token_bytes[index] == token.content;
  if (!same_text) {
    NIBBLE_RETURN_IF_ERROR(names.add(token.id, token.content));
  }
  return put_added_token(token, parts);
}

Status apply_tokenizer_config(const TokenizerConfig& config,
                              VocabularyNames& names,
                              TokenizerParts& parts) {
  for (AddedToken token : config.added_tokens) {
    if (token.normalized && !parts.normalizer.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(token.pattern,
                              parts.normalizer.apply({token.content}, SectionPlace::kTextStart));
    }
    NIBBLE_RETURN_IF_ERROR(list_added_token(token, names, parts)
                               .with_context("tokenizer_config.json: field added_tokens_decoder"));
  }
  if (!config.bos_token.empty()) {
    parts.bos_token = config.bos_token;
    parts.bos_id = find_token(parts, config.bos_token);
  }
  if (!config.eos_token.empty()) {
    parts.eos_token = config.eos_token;
    parts.eos_id = find_token(parts, config.eos_token);
  }
  if (config.add_bos_token.has_value()) {
    parts.prompt_prefix.clear();
    if (*config.add_bos_token) {
      if (!parts.bos_id) {
        return make_error(StatusCode::kCorrupt,
                          "tokenizer_config.json: field add_bos_token is true, but field bos_token "
                          "('{}') names no token of the vocabulary",
                          config.bos_token);
      }
      parts.prompt_prefix.push_back(*parts.bos_id);
    }
  }
  return {};
}

std::optional<std::string> byte_level_decoded(std::string_view piece) {
  // GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others follow from U+0100.
  const auto printable = [](char32_t c) {
    return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xFF && c != 0xAD);
  };
  std::string bytes;
  for (size_t at = 0; at < piece.size();) {
    const size_t length = utf8_step(piece, at).length;
    const char32_t c = utf8_decode(piece.substr(at, length));
    at += length;
    if (c < 0x100) {
      if (!printable(c)) return std::nullopt;
      bytes += static_cast<char>(c);
    } else if (c <= 0x120) {  // 0x00 to 0x20
      bytes += static_cast<char>(c - 0x100);
    } else if (c <= 0x142) {  // 0x7F to 0xA0
      bytes += static_cast<char>(c - 0x121 + 0x7F);
    } else if (c == 0x143) {
      bytes += static_cast<char>(0xAD);
    } else {
      return std::nullopt;
    }
  }
  return bytes;
}

std::optional<uint8_t> byte_piece_value(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') {
    return std::nullopt;
  }
  uint8_t value = 0;
  const auto [end, error] = std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
  return error == std::errc() && end == piece.data() + 5 ? std::optional(value) : std::nullopt;
}

}  // namespace nibble
