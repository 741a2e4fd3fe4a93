#include "text/bpe_model.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "base/check.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

constexpr int32_t kNone = -1;

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

// Fibonacci hashing: the high bits of the product are well mixed.
size_t slot_of(uint64_t key, size_t slots) {
  key ^= key >> 29;
  return static_cast<size_t>((key * 0x9E3779B97F4A7C15ULL) >> 32) & (slots - 1);
}

}  // namespace

// A stretch of the word that is one token (or one unknown unit), in a doubly linked list.
struct BpeModel::Symbol {
  int32_t previous;
  int32_t next;
  uint32_t begin;
  uint32_t length;  // 0: merged into the symbol before
  int32_t id;       // kNone: unknown
};

// A possible merge; stale once either side has changed, which the lengths show.
struct BpeModel::Candidate {
  uint32_t rank;
  int32_t left;
  uint32_t left_length;
  uint32_t right_length;
  int32_t id;

  // Order of std::priority_queue: the lowest rank, then the leftmost, comes out first.
  bool operator<(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : left > other.left;
  }
};

BpeModel::BpeModel(BpeVocabulary vocabulary, BpeOptions options)
    : vocabulary_(std::move(vocabulary)), options_(options) {
  unit_byte_.fill(kNone);
  ids_.reserve(vocabulary_.pieces.size());
  for (size_t id = 0; id < vocabulary_.pieces.size(); ++id) {
    const std::string& piece = vocabulary_.pieces[id];
    if (piece.empty()) continue;
    ids_.emplace(piece, static_cast<int32_t>(id));
    longest_piece_ = std::max(longest_piece_, piece.size());
    if (piece.size() == 1) {
      unit_byte_[static_cast<uint8_t>(piece[0])] = static_cast<int32_t>(id);
    }
  }
}

Result<BpeModel> BpeModel::from_merges(BpeVocabulary vocabulary,
                                       const std::vector<Merge>& merges,
                                       BpeOptions options,
                                       std::string_view where) {
  BpeModel model(std::move(vocabulary), options);
  model.pairs_.assign(std::bit_ceil(merges.size() * 2 + 2), {0, {0, kNone}});
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto left_id = model.find(left);
    const auto right_id = model.find(right);
    const auto joined_id = model.find(left + right);
    if (!left_id || !right_id || !joined_id) {
      const std::string missing = !left_id ? left : !right_id ? right : left + right;
      return make_error(StatusCode::kCorrupt, "{}: merge {} needs '{}', which is not in the vocab",
                        where, rank, missing);
    }
    model.insert_pair(pair_key(*left_id, *right_id), {static_cast<uint32_t>(rank), *joined_id});
  }
  return model;
}

BpeModel BpeModel::from_ranks(BpeVocabulary vocabulary,
                              std::vector<uint32_t> ranks,
                              BpeOptions options) {
  CHECK_EQ(vocabulary.pieces.size(), ranks.size());
  BpeModel model(std::move(vocabulary), options);
  model.ranks_ = std::move(ranks);
  return model;
}

std::optional<int32_t> BpeModel::find(std::string_view piece) const {
  const auto found = ids_.find(piece);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

void BpeModel::insert_pair(uint64_t key, MergeResult value) {
  size_t slot = slot_of(key, pairs_.size());
  while (pairs_[slot].second.id != kNone) {
    if (pairs_[slot].first == key) {
      return;  // a merge listed twice keeps its first rank
    }
    slot = (slot + 1) & (pairs_.size() - 1);
  }
  pairs_[slot] = {key, value};
}

BpeModel::MergeResult BpeModel::find_pair(uint64_t key) const {
  size_t slot = slot_of(key, pairs_.size());
  while (pairs_[slot].second.id != kNone && pairs_[slot].first != key) {
    slot = (slot + 1) & (pairs_.size() - 1);
  }
  return pairs_[slot].second;
}

BpeModel::MergeResult BpeModel::merge_of(std::string_view word,
                                         const Symbol& left,
                                         const Symbol& right) const {
  if (!ranks_.empty()) {
    const size_t length = size_t{left.length} + right.length;
    if (length > longest_piece_) {
      return {0, kNone};
    }
    const auto found = ids_.find(word.substr(left.begin, length));
    return found == ids_.end()
               ? MergeResult{0, kNone}
               : MergeResult{ranks_[static_cast<size_t>(found->second)], found->second};
  }
  if (left.id == kNone || right.id == kNone) {
    return {0, kNone};
  }
  return find_pair(pair_key(left.id, right.id));
}

std::vector<BpeModel::Symbol> BpeModel::cut(std::string_view word) const {
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (size_t at = 0; at < word.size();) {
    size_t length = 1;
    int32_t id = kNone;
    if (options_.unit == SymbolUnit::kByte) {
      id = unit_byte_[static_cast<uint8_t>(word[at])];
    } else {
      length = utf8_step(word, at).length;
      id = find(word.substr(at, length)).value_or(kNone);
    }
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({.previous = index - 1,
                       .next = index + 1,
                       .begin = static_cast<uint32_t>(at),
                       .length = static_cast<uint32_t>(length),
                       .id = id});
    at += length;
  }
  symbols.back().next = kNone;
  return symbols;
}

void BpeModel::merge(std::string_view word, std::vector<Symbol>& symbols) const {
  std::vector<Candidate> candidates;
  candidates.reserve(symbols.size() * 2);
  const auto candidate_at = [&](int32_t left) -> std::optional<Candidate> {
    const Symbol& a = symbols[static_cast<size_t>(left)];
    if (a.next == kNone) {
      return std::nullopt;
    }
    const Symbol& b = symbols[static_cast<size_t>(a.next)];
    const MergeResult result = merge_of(word, a, b);
    if (result.id == kNone) {
      return std::nullopt;
    }
    return Candidate{result.rank, left, a.length, b.length, result.id};
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    if (const auto candidate = candidate_at(static_cast<int32_t>(i))) {
      candidates.push_back(*candidate);
    }
  }
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(candidates));
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[static_cast<size_t>(best.left)];
    if (left.length != best.left_length || left.next == kNone) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    if (right.length != best.right_length) continue;
    left.id = best.id;
    left.length += right.length;
    left.next = right.next;
    right.length = 0;
    if (left.next != kNone) {
      symbols[static_cast<size_t>(left.next)].previous = best.left;
    }
    if (const auto candidate = candidate_at(best.left)) queue.push(*candidate);
    if (left.previous != kNone) {
      if (const auto candidate = candidate_at(left.previous)) queue.push(*candidate);
    }
  }
}

void BpeModel::emit(std::string_view word,
                    const std::vector<Symbol>& symbols,
                    std::vector<int32_t>& out) const {
  bool after_unknown = false;
  for (int32_t at = 0; at != kNone; at = symbols[static_cast<size_t>(at)].next) {
    const Symbol& symbol = symbols[static_cast<size_t>(at)];
    if (symbol.id != kNone) {
      out.push_back(symbol.id);
      after_unknown = false;
      continue;
    }
    const std::string_view text = word.substr(symbol.begin, symbol.length);
    const auto byte_token = [&](char c) { return vocabulary_.byte_id[static_cast<uint8_t>(c)]; };
    if (options_.byte_fallback &&
        std::all_of(text.begin(), text.end(), [&](char c) { return byte_token(c) != kNone; })) {
      for (const char c : text) out.push_back(byte_token(c));
      after_unknown = false;
      continue;
    }
    if (options_.unknown_id && !(after_unknown && options_.fuse_unknown)) {
      out.push_back(*options_.unknown_id);
    }
    after_unknown = true;
  }
}

void BpeModel::encode(std::string_view word, std::vector<int32_t>& out) const {
  if (word.empty()) {
    return;
  }
  CHECK_LT(word.size(), size_t{1} << 31);
  if (options_.whole_word_first && word.size() <= longest_piece_) {
    if (const auto id = find(word)) {
      out.push_back(*id);
      return;
    }
  }
  std::vector<Symbol> symbols = cut(word);
  merge(word, symbols);
  emit(word, symbols, out);
}

}  // namespace nibble
