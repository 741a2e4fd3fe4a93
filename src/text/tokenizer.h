#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "text/added_tokens.h"
#include "text/bpe_model.h"
#include "text/pretokenizer.h"
#include "text/tokenizer_normalizer.h"

namespace nibble {

/// Which tokens appear in decoded text.
enum class DecodeSpecials { kKeep, kSkip };

/// Everything a loader finds out about a tokenizer.
struct TokenizerParts {
  std::vector<std::string> token_bytes;  // by id, as the token appears in text; "" where unused
  std::vector<AddedToken> added_tokens;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  std::optional<BpeModel> model;

  std::vector<int32_t> prompt_prefix;  // ids before every prompt, usually BOS or nothing
  std::string bos_token;               // "" if the tokenizer has none
  std::string eos_token;
  std::optional<int32_t> bos_id;
  std::optional<int32_t> eos_id;
  bool strip_leading_space = false;  // the first token's space was put there by the tokenizer
};

/// Turns text into token ids and back: byte-level BPE and SentencePiece BPE, from tokenizer.json,
/// tokenizer.model, tiktoken ranks, or vocab.json with merges.txt. Immutable and thread-safe.
class Tokenizer final {
 public:
  /// Reads the tokenizer of a model directory: tokenizer.json, else tokenizer.model (SentencePiece
  /// or Llama 3's ranks), else tiktoken.model or one *.tiktoken, else vocab.json with merges.txt;
  /// with the added and special tokens of tokenizer_config.json if that is there.
  /// Errors: kNotFound without any of these, kCorrupt and kUnsupported with file and field.
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& model_dir);

  /// Builds from parts; the loaders in tokenizer_loaders.h fill them.
  /// Errors: kCorrupt if an id is out of range.
  static Result<std::unique_ptr<Tokenizer>> create(TokenizerParts parts);

  /// Ids of `text`, never with BOS. With kPlain, special tokens in the text are ordinary text
  /// (added tokens that are not special are still found, as in the models' reference code).
  /// Invalid UTF-8 counts as U+FFFD.
  /// Errors: kInvalidArgument for a text that a regular expression of the tokenizer takes too long
  /// for, with the file and field of the expression and about where in the text.
  [[nodiscard]] Result<std::vector<int32_t>> encode(std::string_view text,
                                                    SpecialTokens mode) const;

  /// Like encode with kParse, after the tokens that the tokenizer puts before a prompt (BOS, if its
  /// post_processor or add_bos_token says so).
  [[nodiscard]] Result<std::vector<int32_t>> encode_prompt(std::string_view text) const;

  /// Bytes of one token as they stand in text: maybe part of a character, "" for an unknown id.
  [[nodiscard]] const std::string& token_bytes(int32_t id) const;

  /// Text of `ids`; bytes that are no UTF-8 become U+FFFD. The space that SentencePiece puts before
  /// the first word is removed again.
  [[nodiscard]] std::string decode(std::span<const int32_t> ids, DecodeSpecials specials) const;

  /// One more than the largest id.
  [[nodiscard]] int32_t vocab_size() const;
  [[nodiscard]] std::optional<int32_t> bos_id() const { return parts_.bos_id; }
  [[nodiscard]] std::optional<int32_t> eos_id() const { return parts_.eos_id; }
  /// As chat templates see them; "" if the tokenizer has none.
  [[nodiscard]] const std::string& bos_token() const { return parts_.bos_token; }
  [[nodiscard]] const std::string& eos_token() const { return parts_.eos_token; }
  /// True for control tokens, which are no part of a text (BOS, role markers, ...).
  [[nodiscard]] bool is_special(int32_t id) const;
  /// Id of the added token with this content, else of the token with exactly these bytes.
  [[nodiscard]] std::optional<int32_t> token_to_id(std::string_view token) const;
  /// Ids put before prompts by encode_prompt.
  [[nodiscard]] const std::vector<int32_t>& prompt_prefix() const { return parts_.prompt_prefix; }
  /// True if decoded text loses the space before its first word.
  [[nodiscard]] bool strips_leading_space() const { return parts_.strip_leading_space; }

 private:
  explicit Tokenizer(TokenizerParts parts);

  Status encode_section(TextPart section,
                        SectionPlace place,
                        SpecialTokens mode,
                        std::vector<int32_t>& ids) const;

  TokenizerParts parts_;
  AddedTokenMatcher raw_matcher_;         // on the text as given
  AddedTokenMatcher normalized_matcher_;  // on normalized text
  std::vector<uint8_t> special_;          // by id
  std::unordered_map<std::string, int32_t> added_ids_;
  std::unordered_map<std::string_view, int32_t> ids_by_bytes_;  // views into parts_.token_bytes
};

}  // namespace nibble
