#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/tokenizer.h"
#include "text/vocabulary_names.h"

namespace nibble {

/// Token ids are smaller than this; published vocabularies end below 300,000.
inline constexpr int32_t kTokenIdLimit = 1 << 21;

/// What tokenizer_config.json says about a tokenizer; all optional.
struct TokenizerConfig {
  std::string tokenizer_class;  // "" if absent
  std::string bos_token;
  std::string eos_token;
  std::optional<bool> add_bos_token;
  bool legacy = true;  // SentencePiece: a space is put before every section, not only the first
  std::vector<AddedToken> added_tokens;

  /// Errors: kCorrupt with the name of the field. `where` names the file.
  static Result<TokenizerConfig> parse(std::string_view json_text, std::string_view where);
};

// Each loader takes the contents of files; `where` names the file in errors.

/// tokenizer.json with a BPE model.
Result<std::unique_ptr<Tokenizer>> tokenizer_from_json(std::string_view tokenizer_json,
                                                       const TokenizerConfig& config,
                                                       std::string_view where = "tokenizer.json");

/// The same, parsed.
Result<std::unique_ptr<Tokenizer>> tokenizer_from_parsed(const Json& root,
                                                         const TokenizerConfig& config,
                                                         std::string_view where);

/// GPT-2's files: byte-level BPE cut by `pattern`. `unicode_nfc` as Qwen has it.
struct VocabAndMerges {
  std::string_view vocab_json;
  std::string_view merges_txt;
  std::string_view pattern;
  bool unicode_nfc = false;
};
Result<std::unique_ptr<Tokenizer>> tokenizer_from_vocab(const VocabAndMerges& files,
                                                        const TokenizerConfig& config);

/// tiktoken ranks ("<base64> <rank>" lines) cut by `pattern`; config holds the special tokens.
Result<std::unique_ptr<Tokenizer>> tokenizer_from_tiktoken(std::string_view ranks,
                                                           std::string_view pattern,
                                                           const TokenizerConfig& config,
                                                           std::string_view where);

/// A serialized SentencePiece BPE model.
Result<std::unique_ptr<Tokenizer>> tokenizer_from_sentencepiece(
    std::string_view model_bytes,
    const TokenizerConfig& config,
    std::string_view where = "tokenizer.model");

// Shared by the loaders.

/// Puts the added tokens and the BOS, EOS and prompt prefix of `config` into `parts`; what the
/// config does not say stays as it is.
/// Errors: kCorrupt if add_bos_token asks for a BOS that does not exist, and those of
/// list_added_token.
Status apply_tokenizer_config(const TokenizerConfig& config,
                              VocabularyNames& names,
                              TokenizerParts& parts);

/// Adds a token, replacing one with the same content; grows token_bytes as needed.
/// Errors: kCorrupt for an id that is negative or at least kTokenIdLimit, and for a second id of
/// the same content.
Status put_added_token(const AddedToken& token, TokenizerParts& parts);

/// Like put_added_token, for a token of a list beside the vocabulary.
/// Errors: also kCorrupt if the token contradicts `names`.
Status list_added_token(const AddedToken& token, VocabularyNames& names, TokenizerParts& parts);

/// One element of added_tokens or of added_tokens_decoder, without its id.
Result<AddedToken> parse_added_token(const Json& json, const std::string& where);

/// The bytes that a piece of a byte-level vocabulary stands for ("Ġthe" is " the"); nullopt if it
/// has a character that stands for no byte.
[[nodiscard]] std::optional<std::string> byte_level_decoded(std::string_view piece);

/// The byte of a piece "<0xNN>", or nullopt.
[[nodiscard]] std::optional<uint8_t> byte_piece_value(std::string_view piece);

}  // namespace nibble
