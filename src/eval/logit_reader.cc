#include "eval/logit_reader.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/math.h"

namespace nibble {
namespace {

constexpr int64_t kLogitBytes = int64_t{64} << 20;  // of a step

}  // namespace

LogitLimits LogitLimits::of_vocabulary(int64_t vocab_size) {
  LogitLimits limits;
  const int64_t held = kLogitBytes / (vocab_size * static_cast<int64_t>(sizeof(float)));
  limits.rows = std::clamp<int64_t>(held, 16, limits.tokens);
  return limits;
}

ModelOptions LogitLimits::model_options() const {
  // A step never has more sequences than it may have rows.
  return {.max_batch_tokens = tokens, .max_logit_rows = rows};
}

LogitReader::LogitReader(Model& model, PagedKvCache cache, const Options& options)
    : model_(model),
      cache_(std::move(cache)),
      options_(options),
      pages_of_sequence_(ceil_div(options.longest, options.page_size)) {
  pages_.resize(static_cast<size_t>(pages_of_sequence_ * options.sequences));
  std::iota(pages_.begin(), pages_.end(), 0);
  logits_.resize(static_cast<size_t>(options.limits.rows * model.config().vocab_size));
}

Result<LogitReader> LogitReader::create(Model& model, const Options& options) {
  if (options.longest > model.config().max_position) {
    return make_error(StatusCode::kInvalidArgument,
                      "{} tokens in one sequence: the model's context ends at {}", options.longest,
                      model.config().max_position);
  }
  const int64_t pages = ceil_div(options.longest, options.page_size) * options.sequences;
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model.make_cache(KvCacheShape::equal_pools(
                                                  options.layers, options.page_size, pages)));
  return LogitReader(model, std::move(cache), options);
}

Status LogitReader::begin(std::span<const Feed> feeds) {
  const int64_t vocab = model_.config().vocab_size;
  for (const Feed& feed : feeds) {
    CHECK_LT(feed.sequence, options_.sequences);
    CHECK_LE(feed.start + std::ssize(feed.tokens), options_.longest);
    for (const int32_t token : feed.tokens) {
      if (token < 0 || token >= vocab) {
        return make_error(StatusCode::kInvalidArgument,
                          "the text has token id {}, but the model's vocabulary has {} tokens; the "
                          "tokenizer belongs to another model",
                          token, vocab);
      }
    }
  }
  feeds_ = feeds;
  feed_ = 0;
  done_ = 0;
  return {};
}

// How much of a feed still fits into the step.
int64_t LogitReader::part_size(const Feed& feed) const {
  const LogitLimits& limits = options_.limits;
  if (std::ssize(spans_) == limits.rows) {
    return 0;
  }
  const int64_t room = limits.tokens - std::ssize(tokens_);
  const int64_t without_rows = std::max<int64_t>(feed.first_row - done_, 0);
  const int64_t most = without_rows + limits.rows - std::ssize(rows_);
  return std::min({std::ssize(feed.tokens) - done_, room, most});
}

void LogitReader::add_part(const Feed& feed, int64_t count) {
  const auto begin = static_cast<int32_t>(tokens_.size());
  const auto part = feed.tokens.subspan(static_cast<size_t>(done_), static_cast<size_t>(count));
  tokens_.insert(tokens_.end(), part.begin(), part.end());
  spans_.push_back({.q_begin = begin,
                    .q_len = static_cast<int32_t>(count),
                    .kv_len = static_cast<int32_t>(feed.start + done_ + count),
                    .pages = &pages_[static_cast<size_t>(feed.sequence * pages_of_sequence_)],
                    .prompt_len = static_cast<int32_t>(feed.prompt_len)});
  for (int64_t token = std::max(done_, feed.first_row); token < done_ + count; ++token) {
    rows_.push_back(begin + static_cast<int32_t>(token - done_));
    places_.push_back({.feed = feed_, .token = token});
  }
  done_ += count;
}

void LogitReader::fill_step() {
  tokens_.clear();
  spans_.clear();
  rows_.clear();
  places_.clear();
  while (feed_ < std::ssize(feeds_)) {
    const Feed& feed = feeds_[static_cast<size_t>(feed_)];
    const int64_t count = part_size(feed);
    if (count > 0) {
      add_part(feed, count);
    }
    if (done_ < std::ssize(feed.tokens)) {
      return;
    }
    ++feed_;
    done_ = 0;
  }
}

LogitStep LogitReader::next() {
  const auto vocab = static_cast<size_t>(model_.config().vocab_size);
  do {
    fill_step();
    if (tokens_.empty()) {
      return {};
    }
    const size_t size = rows_.size() * vocab;
    model_.forward({.tokens = tokens_, .sequences = spans_, .logit_rows = rows_}, cache_,
                   std::span(logits_).first(size));
  } while (rows_.empty());
  return {.rows = places_, .logits = std::span(logits_).first(rows_.size() * vocab)};
}

}  // namespace nibble
