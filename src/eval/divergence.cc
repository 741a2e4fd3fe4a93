#include "eval/divergence.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>

#include "model/not_finite.h"

namespace nibble {
namespace {

constexpr int64_t kFirstBucket = 16;  // its upper end: fewer tokens of context than this

// Whose logits are at fault, where some are not finite.
Status check_finite(std::span<const PlacedDivergence> tokens,
                    const BaseRows& base,
                    const Model& model) {
  for (const auto& [at, context] : tokens) {
    if (!std::isfinite(at.base_nll)) {
      return base.explain_not_finite();
    }
    if (!std::isfinite(at.nll) || !std::isfinite(at.kl)) {
      return explain_not_finite(model);
    }
  }
  return {};
}

// Compares a step's rows, which are shared out among the threads.
std::vector<PlacedDivergence> compare(std::span<const float> base,
                                      const LogitStep& step,
                                      std::span<const EvalWindow> windows,
                                      ThreadPool& pool) {
  std::vector<PlacedDivergence> out(step.rows.size());
  const size_t vocab = base.size() / step.rows.size();
  pool.parallel_for(std::ssize(step.rows), [&](int64_t chunk, int) {
    const auto i = static_cast<size_t>(chunk);
    const RowPlace place = step.rows[i];
    const EvalWindow& window = windows[static_cast<size_t>(place.feed)];
    const int32_t target = window.tokens[static_cast<size_t>(place.token) + 1];
    out[i] = {.at = compare_logits(base.subspan(i * vocab, vocab), step.row(i), target),
              .context = place.token + 1};
  });
  return out;
}

using OnStep = std::function<Status(const LogitStep&, std::span<const EvalWindow>)>;

// Runs `on_step` for every step of every group of windows, and `on_group` in front of a group.
Status for_each_step(LogitReader& reader,
                     std::span<const EvalWindow> windows,
                     const std::function<Status(std::span<const Feed>)>& on_group,
                     const OnStep& on_step) {
  const auto group = static_cast<size_t>(reader.options().sequences);
  for (size_t begin = 0; begin < windows.size(); begin += group) {
    const auto some = windows.subspan(begin, std::min(group, windows.size() - begin));
    const std::vector<Feed> feeds = feeds_of(some);
    NIBBLE_RETURN_IF_ERROR(reader.begin(feeds));
    NIBBLE_RETURN_IF_ERROR(on_group(feeds));
    for (LogitStep step = reader.next(); !step.rows.empty(); step = reader.next()) {
      NIBBLE_RETURN_IF_ERROR(on_step(step, some));
    }
  }
  return {};
}

template <typename Value>
std::vector<double> column(std::span<const PlacedDivergence> tokens, const Value& value) {
  std::vector<double> out(tokens.size());
  std::ranges::transform(tokens, out.begin(),
                         [&](const PlacedDivergence& token) { return value(token.at); });
  return out;
}

std::vector<DivergenceBucket> buckets_of(std::span<const PlacedDivergence> tokens) {
  std::map<int64_t, std::vector<PlacedDivergence>> by_end;
  for (const PlacedDivergence& token : tokens) {
    const auto end = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(token.context) + 1));
    by_end[std::max(end, kFirstBucket)].push_back(token);
  }
  std::vector<DivergenceBucket> buckets;
  for (const auto& [end, some] : by_end) {
    const auto kl = column(some, [](const TokenDivergence& at) { return at.kl; });
    const auto same = column(some, [](const TokenDivergence& at) { return at.same_top ? 1. : 0.; });
    buckets.push_back({.from = end == kFirstBucket ? 1 : end / 2,
                       .to = end - 1,
                       .tokens = std::ssize(some),
                       .kl = estimate_of(kl),
                       .same_top = estimate_of(same).mean});
  }
  return buckets;
}

// values: ascending
std::vector<DivergenceBin> histogram_of(std::span<const double> values) {
  constexpr double kFirst = 1e-7;
  constexpr double kPerDecade = 4;
  std::vector<DivergenceBin> bins = {{.from = 0, .to = kFirst}};
  for (const double value : values) {
    while (value >= bins.back().to) {
      const double to = kFirst * std::pow(10.0, static_cast<double>(bins.size()) / kPerDecade);
      bins.push_back({.from = bins.back().to, .to = to});
    }
    ++bins.back().tokens;
  }
  return bins;
}

}  // namespace

DivergenceResult summarize(std::span<const PlacedDivergence> tokens) {
  CHECK(!tokens.empty());
  std::vector<double> kl = column(tokens, [](const TokenDivergence& at) { return at.kl; });
  const auto same = column(tokens, [](const TokenDivergence& at) { return at.same_top ? 1. : 0.; });
  const auto base_nll = column(tokens, [](const TokenDivergence& at) { return at.base_nll; });
  const auto nll = column(tokens, [](const TokenDivergence& at) { return at.nll; });
  const auto delta = column(
      tokens, [](const TokenDivergence& at) { return std::exp(-at.nll) - std::exp(-at.base_nll); });
  DivergenceResult out{.tokens = std::ssize(tokens), .kl = estimate_of(kl)};
  std::ranges::sort(kl);
  out.median = quantile(kl, 0.5);
  out.p90 = quantile(kl, 0.9);
  out.p99 = quantile(kl, 0.99);
  out.p999 = quantile(kl, 0.999);
  out.largest = kl.back();
  out.histogram = histogram_of(kl);
  out.same_top = estimate_of(same);
  out.delta_p = estimate_of(delta);
  out.delta_p_rms = root_mean_square(delta);
  out.base_nll = estimate_of(base_nll);
  out.nll = estimate_of(nll);
  out.log_ratio = paired_difference(nll, base_nll);
  out.buckets = buckets_of(tokens);
  return out;
}

Result<DivergenceResult> evaluate_divergence(BaseRows& base,
                                             LogitReader& reader,
                                             std::span<const EvalWindow> windows,
                                             const EvalRun& run) {
  std::vector<PlacedDivergence> tokens;
  NIBBLE_RETURN_IF_ERROR(for_each_step(
      reader, windows, [&](std::span<const Feed> feeds) { return base.begin(feeds); },
      [&](const LogitStep& step, std::span<const EvalWindow> some) -> Status {
        NIBBLE_ASSIGN_OR_RETURN(const std::span<const float> rows,
                                base.next(std::ssize(step.rows)));
        const auto more = compare(rows, step, some, run.pool);
        NIBBLE_RETURN_IF_ERROR(check_finite(more, base, reader.model()));
        tokens.insert(tokens.end(), more.begin(), more.end());
        run.progress(std::ssize(tokens));
        return {};
      }));
  return summarize(tokens);
}

Status save_base(LogitReader& reader,
                 std::span<const EvalWindow> windows,
                 const EvalRun& run,
                 BaseFileWriter& writer) {
  int64_t done = 0;
  Status status = for_each_step(
      reader, windows, [](std::span<const Feed>) { return Status(); },
      [&](const LogitStep& step, std::span<const EvalWindow>) -> Status {
        if (!std::ranges::all_of(step.logits, [](float logit) { return std::isfinite(logit); })) {
          return explain_not_finite(reader.model());
        }
        NIBBLE_RETURN_IF_ERROR(writer.write(step.logits, run.pool));
        done += std::ssize(step.rows);
        run.progress(done);
        return {};
      });
  if (!status.ok()) {
    writer.discard();
    return status;
  }
  return writer.finish();
}

}  // namespace nibble
