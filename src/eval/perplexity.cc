#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/thread_pool.h"
#include "model/not_finite.h"

namespace nibble {
namespace {

constexpr int64_t kChunk = 64;  // tokens of one forward pass: bounds the logits in memory

// -log softmax(logits)[target], in double precision.
double negative_log_likelihood(std::span<const float> logits, int32_t target) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit) - largest);
  }
  return std::log(sum) + largest - static_cast<double>(logits[static_cast<size_t>(target)]);
}

// The sum over rows of logits [targets.size(), vocab]. Rows are shared out among the threads, and
// added in their order.
double nll_of_rows(std::span<const float> logits,
                   std::span<const int32_t> targets,
                   ThreadPool& pool) {
  std::vector<double> rows(targets.size());
  const size_t vocab = logits.size() / targets.size();
  pool.parallel_for(static_cast<int64_t>(rows.size()), [&](int64_t chunk, int) {
    const auto i = static_cast<size_t>(chunk);
    rows[i] = negative_log_likelihood(logits.subspan(i * vocab, vocab), targets[i]);
  });
  return std::accumulate(rows.begin(), rows.end(), 0.0);
}

Status check(const Model& model,
             const PagedKvCache& cache,
             std::span<const int32_t> tokens,
             int64_t window) {
  const int64_t room = std::ranges::min(cache.shape().num_pages) * cache.shape().page_size;
  const int64_t longest = std::min(model.config().max_position, room);
  if (window < 2 || window > longest) {
    return make_error(StatusCode::kInvalidArgument,
                      "--window {}: must lie between 2 and {}, the model's context", window,
                      longest);
  }
  if (tokens.size() < 2) {
    return make_error(StatusCode::kInvalidArgument, "the text has {} tokens; at least 2 are needed",
                      tokens.size());
  }
  const int64_t vocab = model.config().vocab_size;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocab) {
      return make_error(StatusCode::kInvalidArgument,
                        "the text has token id {}, but the model's vocabulary has {} tokens; the "
                        "tokenizer belongs to another model",
                        token, vocab);
    }
  }
  return {};
}

}  // namespace

Result<PerplexityResult> evaluate_perplexity(Model& model,
                                             PagedKvCache& cache,
                                             std::span<const int32_t> tokens,
                                             const PerplexityOptions& options) {
  const auto total = static_cast<int64_t>(tokens.size());
  const int64_t window = options.window;
  NIBBLE_RETURN_IF_ERROR(check(model, cache, tokens, window));
  const int64_t vocab = model.config().vocab_size;
  std::vector<int32_t> pages(static_cast<size_t>(std::ranges::min(cache.shape().num_pages)));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<int32_t> rows(static_cast<size_t>(kChunk));
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<float> logits(static_cast<size_t>(kChunk * vocab));
  ThreadPool pool(options.threads);
  PerplexityResult result;
  const int64_t length = std::min(window, total);
  for (int64_t begin = 0; begin + length <= total; begin += length) {
    const int64_t end = begin + length;
    for (int64_t at = begin; at < end - 1; at += kChunk) {  // the last token predicts nothing here
      const int64_t count = std::min(kChunk, end - 1 - at);
      const SequenceSpan span{.q_begin = 0,
                              .q_len = static_cast<int32_t>(count),
                              .kv_len = static_cast<int32_t>(at + count - begin),
                              .pages = pages.data(),
                              .prompt_len = static_cast<int32_t>(length)};
      const auto step = std::span<float>(logits).first(static_cast<size_t>(count * vocab));
      model.forward({tokens.subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
                     {&span, 1},
                     std::span<const int32_t>(rows).first(static_cast<size_t>(count))},
                    cache, step);
      result.nll_sum += nll_of_rows(
          step, tokens.subspan(static_cast<size_t>(at + 1), static_cast<size_t>(count)), pool);
      result.scored_tokens += count;
    }
    if (!std::isfinite(result.nll_sum)) {
      return explain_not_finite(model).with_context(
          fmt::format("in the window at token {}", begin));
    }
    options.progress(end);
  }
  result.perplexity = std::exp(result.nll_sum / static_cast<double>(result.scored_tokens));
  return result;
}

}  // namespace nibble
