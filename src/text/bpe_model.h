#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace nibble {

/// What a word is cut into before merging.
enum class SymbolUnit { kByte, kCodePoint };

/// How a model treats what its vocabulary lacks.
struct BpeOptions {
  SymbolUnit unit = SymbolUnit::kByte;
  bool whole_word_first = false;  // a word that is a token is not merged (ignore_merges, tiktoken)
  bool byte_fallback = false;     // unknown characters become <0xNN> tokens
  bool fuse_unknown = false;      // neighbouring unknown characters become one unknown token
  std::optional<int32_t> unknown_id;  // absent: unknown characters are dropped
};

/// Tokens that the model can produce, by their text as it stands in words.
struct BpeVocabulary {
  std::vector<std::string> pieces;   // by id; an empty string is never produced
  std::array<int32_t, 256> byte_id;  // tokens <0xNN> of byte fallback, -1 where absent

  BpeVocabulary() { byte_id.fill(-1); }
};

/// Byte-pair merging: of all neighbouring pairs that can merge, the one with the lowest rank merges
/// first, the leftmost among equals. O(n log n) in the length of a word. Immutable, thread-safe.
class BpeModel final {
 public:
  /// One allowed merge of two tokens; ranks are positions in the list.
  using Merge = std::pair<std::string, std::string>;

  /// Pairs merge only as listed (tokenizer.json, merges.txt).
  /// Errors: kCorrupt for a merge whose parts or result are not in the vocabulary; `where` names
  /// the file.
  static Result<BpeModel> from_merges(BpeVocabulary vocabulary,
                                      const std::vector<Merge>& merges,
                                      BpeOptions options,
                                      std::string_view where);

  /// Any pair merges whose joined text is a token; `ranks[id]` orders them (tiktoken: the id;
  /// SentencePiece: the order by falling score). ranks.size() == pieces.size().
  static BpeModel from_ranks(BpeVocabulary vocabulary,
                             std::vector<uint32_t> ranks,
                             BpeOptions options);

  BpeModel(BpeModel&&) = default;
  BpeModel& operator=(BpeModel&&) = default;
  BpeModel(const BpeModel&) = delete;  // ids_ points into vocabulary_
  BpeModel& operator=(const BpeModel&) = delete;
  ~BpeModel() = default;

  /// Appends the tokens of one word (valid UTF-8 if the unit is the code point).
  void encode(std::string_view word, std::vector<int32_t>& out) const;

  /// Id of the token with exactly this text.
  [[nodiscard]] std::optional<int32_t> find(std::string_view piece) const;

 private:
  struct Symbol;
  struct Candidate;
  struct MergeResult {
    uint32_t rank;
    int32_t id;  // -1: these two do not merge
  };

  BpeModel(BpeVocabulary vocabulary, BpeOptions options);

  [[nodiscard]] std::vector<Symbol> cut(std::string_view word) const;
  void merge(std::string_view word, std::vector<Symbol>& symbols) const;
  [[nodiscard]] MergeResult merge_of(std::string_view word,
                                     const Symbol& left,
                                     const Symbol& right) const;
  void emit(std::string_view word,
            const std::vector<Symbol>& symbols,
            std::vector<int32_t>& out) const;

  void insert_pair(uint64_t key, MergeResult value);
  [[nodiscard]] MergeResult find_pair(uint64_t key) const;

  BpeVocabulary vocabulary_;
  BpeOptions options_;
  std::unordered_map<std::string_view, int32_t> ids_;  // views into vocabulary_.pieces
  size_t longest_piece_ = 0;
  std::array<int32_t, 256> unit_byte_;  // token of each single byte, for SymbolUnit::kByte

  std::vector<uint32_t> ranks_;  // by id; empty if merges are listed

  // Open addressing with linear probing; the size is a power of two, a free slot has id -1.
  std::vector<std::pair<uint64_t, MergeResult>> pairs_;
};

}  // namespace nibble
