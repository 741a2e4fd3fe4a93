#include "eval/perplexity.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "eval/probabilities.h"
#include "model/not_finite.h"

namespace nibble {
namespace {

// The negative log-likelihoods of a step's rows; rows are shared out among the threads.
std::vector<double> score(const LogitStep& step,
                          std::span<const EvalWindow> windows,
                          ThreadPool& pool) {
  std::vector<double> nlls(step.rows.size());
  pool.parallel_for(std::ssize(step.rows), [&](int64_t chunk, int) {
    const auto i = static_cast<size_t>(chunk);
    const RowPlace place = step.rows[i];
    const EvalWindow& window = windows[static_cast<size_t>(place.feed)];
    nlls[i] =
        negative_log_likelihood(step.row(i), window.tokens[static_cast<size_t>(place.token) + 1]);
  });
  return nlls;
}

}  // namespace

std::vector<Feed> feeds_of(std::span<const EvalWindow> windows) {
  std::vector<Feed> feeds;
  for (const EvalWindow& window : windows) {
    CHECK_LE(int64_t{1}, window.first_scored);
    feeds.push_back({.sequence = std::ssize(feeds),
                     .tokens = std::span(window.tokens).first(window.tokens.size() - 1),
                     .first_row = window.first_scored - 1,
                     .prompt_len = std::ssize(window.tokens)});
  }
  return feeds;
}

Result<PerplexityResult> evaluate_perplexity(LogitReader& reader,
                                             std::span<const EvalWindow> windows,
                                             const EvalRun& run) {
  std::vector<double> nlls;
  const auto group = static_cast<size_t>(reader.options().sequences);
  for (size_t begin = 0; begin < windows.size(); begin += group) {
    const auto some = windows.subspan(begin, std::min(group, windows.size() - begin));
    const std::vector<Feed> feeds = feeds_of(some);
    NIBBLE_RETURN_IF_ERROR(reader.begin(feeds));
    for (LogitStep step = reader.next(); !step.rows.empty(); step = reader.next()) {
      const std::vector<double> more = score(step, some, run.pool);
      const auto bad = std::ranges::find_if_not(more, [](double x) { return std::isfinite(x); });
      if (bad != more.end()) {
        const RowPlace place = step.rows[static_cast<size_t>(bad - more.begin())];
        return explain_not_finite(reader.model())
            .with_context(fmt::format("in window {}, at its token {}",
                                      static_cast<int64_t>(begin) + place.feed, place.token));
      }
      nlls.insert(nlls.end(), more.begin(), more.end());
    }
    run.progress(std::ssize(nlls));
  }
  PerplexityResult result{.nll_sum = std::accumulate(nlls.begin(), nlls.end(), 0.0),
                          .nll = estimate_of(nlls),
                          .scored_tokens = std::ssize(nlls)};
  result.perplexity = std::exp(result.nll.mean);
  return result;
}

}  // namespace nibble
