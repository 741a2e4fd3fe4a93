#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "arch/kv_specs.h"
#include "model/model.h"

namespace nibble {

/// One sequence of up to 1024 tokens on its own cache, fed in pieces.
class SequenceRunner final {
 public:
  /// The first `prompt` tokens are its prompt; 0: those that are fed first.
  SequenceRunner(Model& model, const Backend& backend, KvCode code, int32_t prompt = 0)
      : model_(model), cache_(make_cache(model, backend, code)), prompt_(prompt) {
    // Pages in descending order, so that nothing relies on their being neighbours.
    std::iota(pages_.rbegin(), pages_.rend(), 0);
  }

  /// Logits of every token [tokens, vocab].
  std::vector<float> feed(std::span<const int32_t> tokens) {
    const auto count = static_cast<int32_t>(tokens.size());
    length_ += count;
    prompt_ = prompt_ == 0 ? count : prompt_;
    const SequenceSpan span{.q_begin = 0,
                            .q_len = count,
                            .kv_len = length_,
                            .pages = pages_.data(),
                            .prompt_len = prompt_};
    std::vector<int32_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<float> logits(tokens.size() * static_cast<size_t>(model_.config().vocab_size));
    model_.forward({.tokens = tokens, .sequences = {&span, 1}, .logit_rows = rows}, cache_, logits);
    return logits;
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

  PagedKvCache make_cache(Model& model, const Backend& backend, KvCode code) {
    const int64_t page_size = backend.preferred_page_size(code);
    pages_.resize(static_cast<size_t>(kTokens / page_size));
    return model
        .make_cache(KvCacheShape::equal_pools(kv_specs(model.config(), code), page_size,
                                              kTokens / page_size))
        .value();
  }

  Model& model_;
  std::vector<int32_t> pages_;
  PagedKvCache cache_;
  int32_t length_ = 0;
  int32_t prompt_;
};

}  // namespace nibble
