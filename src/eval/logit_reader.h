#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model.h"

namespace nibble {

/// Tokens to compute in one of the reader's sequences, and for which of them logits are wanted.
struct Feed {
  int64_t sequence = 0;  // of the reader
  int64_t start = 0;     // place of tokens[0]; what is in front of it was fed before
  std::span<const int32_t> tokens;
  int64_t first_row = 0;   // tokens[first_row ...] give logits
  int64_t prompt_len = 0;  // tokens of the whole sequence, for DynamicRope
};

/// A row of logits: what follows tokens[token] of a feed.
struct RowPlace {
  int64_t feed = 0;
  int64_t token = 0;
};

struct LogitStep {
  std::span<const RowPlace> rows;
  std::span<const float> logits;  // [rows, vocab_size], valid until the next step

  [[nodiscard]] std::span<const float> row(size_t index) const {
    const size_t vocab = logits.size() / rows.size();
    return logits.subspan(index * vocab, vocab);
  }
};

/// Sizes of the steps of a LogitReader. Readers of equal limits cut equal feeds into equal steps.
struct LogitLimits {
  int64_t tokens = 512;  // of one step
  int64_t rows = 512;    // of logits, of one step

  /// As many rows as a share of memory holds.
  static LogitLimits of_vocabulary(int64_t vocab_size);
  /// How a model must be loaded.
  [[nodiscard]] ModelOptions model_options() const;
};

/// Runs token sequences of known text through a model, many in one step, and hands out logits. A
/// sequence keeps its place in the cache: feeding it again from an earlier token on replaces what
/// followed, so that several continuations share one computed beginning.
class LogitReader final {
 public:
  /// A cache for `sequences` of up to `longest` tokens each. kResourceExhausted when it is not to
  /// be had, kInvalidArgument when a sequence would be longer than the model's context. The model
  /// must outlive the reader and have been loaded with limits.model_options().
  struct Options {
    std::vector<KvSpec> layers;
    int64_t page_size = 16;
    int64_t longest = 0;
    int64_t sequences = 1;
    LogitLimits limits = {};
  };
  static Result<LogitReader> create(Model& model, const Options& options);

  /// What next() computes, in this order, one feed of a sequence; `feeds` must stay valid.
  /// kInvalidArgument: a token outside the vocabulary.
  Status begin(std::span<const Feed> feeds);
  /// The next step that has logits; without rows when all is computed.
  LogitStep next();

  [[nodiscard]] const Model& model() const { return model_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  LogitReader(Model& model, PagedKvCache cache, const Options& options);

  void fill_step();
  void add_part(const Feed& feed, int64_t count);
  [[nodiscard]] int64_t part_size(const Feed& feed) const;

  Model& model_;
  PagedKvCache cache_;
  Options options_;
  int64_t pages_of_sequence_;
  std::vector<int32_t> pages_;  // of all sequences, one after another
  std::span<const Feed> feeds_;
  int64_t feed_ = 0;  // where the next step begins
  int64_t done_ = 0;  // tokens of that feed
  std::vector<int32_t> tokens_;
  std::vector<SequenceSpan> spans_;
  std::vector<int32_t> rows_;
  std::vector<RowPlace> places_;
  std::vector<float> logits_;
};

}  // namespace nibble
