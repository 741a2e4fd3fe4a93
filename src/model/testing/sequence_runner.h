#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "arch/kv_specs.h"
#include "model/model.h"

namespace nibble {

/// One sequence of up to 1024 tokens on its own cache, fed in pieces. Pages that layers with
/// windows have left behind are replaced by one that holds no numbers, where the cache is host
/// memory.
class SequenceRunner final {
 public:
  /// The first `prompt` tokens are its prompt; 0: those that are fed first.
  SequenceRunner(Model& model, const Backend& backend, KvCode code, int32_t prompt = 0)
      : model_(model), cache_(make_cache(model, backend, code)), prompt_(prompt) {
    // Pages in descending order, so that nothing relies on their being neighbours.
    std::iota(pages_.rbegin(), pages_.rend(), 0);
    lists_.assign(static_cast<size_t>(cache_.num_pools()), pages_);
    if (backend.host_memory()) {
      for (int64_t layer = 0; layer < model.config().num_layers; ++layer) {
        const KvView view = cache_.view(layer);
        std::memset(view.keys(unread_page(), 0), 0xff, static_cast<size_t>(view.page_bytes()));
      }
    }
  }

  /// Logits of every token [tokens, vocab].
  std::vector<float> feed(std::span<const int32_t> tokens) {
    const auto count = static_cast<int32_t>(tokens.size());
    length_ += count;
    prompt_ = prompt_ == 0 ? count : prompt_;
    forget_pages(length_ - count);
    std::vector<SequenceSpan> spans;
    for (const std::vector<int32_t>& list : lists_) {
      spans.push_back({.q_begin = 0,
                       .q_len = count,
                       .kv_len = length_,
                       .pages = list.data(),
                       .prompt_len = prompt_});
    }
    return run(tokens, spans);
  }

  /// The same, where each token is a span of its own, one behind the other: as what is proposed to
  /// follow a sequence is verified on devices.
  std::vector<float> feed_rows(std::span<const int32_t> tokens) {
    forget_pages(length_);
    std::vector<SequenceSpan> spans;
    for (const std::vector<int32_t>& list : lists_) {
      for (int32_t row = 0; row < std::ssize(tokens); ++row) {
        spans.push_back({.q_begin = row,
                         .q_len = 1,
                         .kv_len = length_ + row + 1,
                         .pages = list.data(),
                         .prompt_len = prompt_});
      }
    }
    length_ += static_cast<int32_t>(tokens.size());
    return run(tokens, spans);
  }

  /// Every token's logits, the first `prompt` tokens fed at once and the others in chunks.
  std::vector<float> feed_in_chunks(std::span<const int32_t> tokens,
                                    size_t chunk,
                                    size_t prompt = 0) {
    std::vector<float> all;
    for (size_t begin = 0; begin < tokens.size();) {
      const size_t size = begin < prompt ? prompt : std::min(chunk, tokens.size() - begin);
      const std::vector<float> logits = feed(tokens.subspan(begin, size));
      all.insert(all.end(), logits.begin(), logits.end());
      begin += size;
    }
    return all;
  }

 private:
  static constexpr int64_t kTokens = 1024;

  // `spans` of all pools, one pool after the other.
  std::vector<float> run(std::span<const int32_t> tokens, const std::vector<SequenceSpan>& spans) {
    const size_t sequences = spans.size() / lists_.size();
    std::vector<int32_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<float> logits(tokens.size() * static_cast<size_t>(model_.config().vocab_size));
    model_.forward({.tokens = tokens,
                    .sequences = std::span(spans).first(sequences),
                    .logit_rows = rows,
                    .other_pools = std::span(spans).subspan(sequences)},
                   cache_, logits);
    return logits;
  }

  PagedKvCache make_cache(Model& model, const Backend& backend, KvCode code) {
    const int64_t page_size = backend.preferred_page_size(code);
    pages_.resize(static_cast<size_t>(kTokens / page_size));
    return model
        .make_cache(KvCacheShape::equal_pools(kv_specs(model.config(), code), page_size,
                                              kTokens / page_size + 1))
        .value();
  }

  [[nodiscard]] int32_t unread_page() const { return static_cast<int32_t>(pages_.size()); }

  void forget_pages(int64_t position) {
    const KvCacheShape& shape = cache_.shape();
    const std::vector<KvPool> pools = kv_pools(shape.layers);
    for (size_t pool = 0; pool < pools.size(); ++pool) {
      const int64_t first = first_token_read(pools[pool].spec.window, position);
      std::fill_n(lists_[pool].begin(), first / shape.page_size, unread_page());
    }
  }

  Model& model_;
  std::vector<int32_t> pages_;
  std::vector<std::vector<int32_t>> lists_;  // by pool
  PagedKvCache cache_;
  int32_t length_ = 0;
  int32_t prompt_;
};

}  // namespace nibble
