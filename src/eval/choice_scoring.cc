#include "eval/choice_scoring.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "eval/probabilities.h"
#include "model/not_finite.h"

namespace nibble {
namespace {

using Items = std::span<const std::vector<ChoiceTokens>>;
using Scores = std::vector<std::vector<ChoiceScore>>;

// Tokens that all choices begin with. The last token of a choice is never fed.
int64_t shared_tokens(const std::vector<ChoiceTokens>& choices) {
  int64_t shared = choices.front().first_scored;
  for (const ChoiceTokens& choice : choices) {
    shared = std::min(shared, choice.first_scored);
    const auto differ = std::ranges::mismatch(choice.tokens, choices.front().tokens);
    shared = std::min(shared, differ.in1 - choice.tokens.begin());
  }
  return shared;
}

/// Items that are scored together, one in each sequence of the reader.
class Group final {
 public:
  Group(Items items, std::span<std::vector<ChoiceScore>> scores, ThreadPool& pool)
      : items_(items), scores_(scores), pool_(pool) {
    for (const auto& choices : items_) {
      shared_.push_back(shared_tokens(choices));
    }
  }

  /// The shared beginnings; the last row of one says what the first tokens of choices are worth.
  Status score_beginnings(LogitReader& reader) {
    std::vector<Feed> feeds;
    for (size_t item = 0; item < items_.size(); ++item) {
      const std::vector<ChoiceTokens>& choices = items_[item];
      const bool wanted = std::ranges::any_of(choices, [&](const ChoiceTokens& choice) {
        return choice.first_scored == shared_[item];
      });
      feeds.push_back(
          {.sequence = static_cast<int64_t>(item),
           .tokens = std::span(choices.front().tokens).first(static_cast<size_t>(shared_[item])),
           .first_row = shared_[item] - (wanted ? 1 : 0),
           .prompt_len = shared_[item]});
    }
    return read(reader, feeds, [&](const RowPlace& place, std::span<const float> row) {
      const auto item = static_cast<size_t>(place.feed);
      for (size_t choice = 0; choice < items_[item].size(); ++choice) {
        if (items_[item][choice].first_scored == shared_[item]) {
          add(item, choice, {row, shared_[item]});
        }
      }
    });
  }

  /// What follows them, of one choice of each item.
  Status score_endings(LogitReader& reader, size_t choice) {
    std::vector<Feed> feeds;
    for (size_t item = 0; item < items_.size(); ++item) {
      if (choice >= items_[item].size()) {
        continue;
      }
      const ChoiceTokens& one = items_[item][choice];
      const auto fed = std::span(one.tokens).first(one.tokens.size() - 1);
      feeds.push_back({.sequence = static_cast<int64_t>(item),
                       .start = shared_[item],
                       .tokens = fed.subspan(static_cast<size_t>(
                           std::min(shared_[item], static_cast<int64_t>(fed.size())))),
                       .first_row = std::max<int64_t>(one.first_scored - 1 - shared_[item], 0),
                       .prompt_len = std::ssize(one.tokens)});
    }
    return read(reader, feeds, [&](const RowPlace& place, std::span<const float> row) {
      const Feed& feed = feeds[static_cast<size_t>(place.feed)];
      add(static_cast<size_t>(feed.sequence), choice, {row, feed.start + place.token + 1});
    });
  }

  [[nodiscard]] size_t most_choices() const {
    size_t most = 0;
    for (const auto& choices : items_) {
      most = std::max(most, choices.size());
    }
    return most;
  }

 private:
  /// A row of logits, and which token of a choice it predicts.
  struct Prediction {
    std::span<const float> row;
    int64_t token = 0;
  };

  void add(size_t item, size_t choice, const Prediction& prediction) {
    const int32_t target = items_[item][choice].tokens[static_cast<size_t>(prediction.token)];
    ChoiceScore& score = scores_[item][choice];
    score.log_likelihood -= negative_log_likelihood(prediction.row, target);
    score.greedy = score.greedy && top_token(prediction.row) == target;
  }

  // Rows of one feed follow each other and are taken by one thread, in their order.
  template <typename OnRow>
  Status read(LogitReader& reader, std::span<const Feed> feeds, const OnRow& on_row) {
    NIBBLE_RETURN_IF_ERROR(reader.begin(feeds));
    for (LogitStep step = reader.next(); !step.rows.empty(); step = reader.next()) {
      std::vector<size_t> firsts;
      for (size_t i = 0; i < step.rows.size(); ++i) {
        if (i == 0 || step.rows[i].feed != step.rows[i - 1].feed) {
          firsts.push_back(i);
        }
      }
      pool_.parallel_for(std::ssize(firsts), [&](int64_t chunk, int) {
        const size_t first = firsts[static_cast<size_t>(chunk)];
        for (size_t i = first; i < step.rows.size() && step.rows[i].feed == step.rows[first].feed;
             ++i) {
          on_row(step.rows[i], step.row(i));
        }
      });
    }
    return {};
  }

  Items items_;
  std::span<std::vector<ChoiceScore>> scores_;
  ThreadPool& pool_;
  std::vector<int64_t> shared_;
};

Status score_group(LogitReader& reader,
                   Items items,
                   std::span<std::vector<ChoiceScore>> scores,
                   ThreadPool& pool) {
  Group group(items, scores, pool);
  NIBBLE_RETURN_IF_ERROR(group.score_beginnings(reader));
  for (size_t choice = 0; choice < group.most_choices(); ++choice) {
    NIBBLE_RETURN_IF_ERROR(group.score_endings(reader, choice));
  }
  for (const auto& item : scores) {
    for (const ChoiceScore& score : item) {
      if (!std::isfinite(score.log_likelihood)) {
        return explain_not_finite(reader.model());
      }
    }
  }
  return {};
}

}  // namespace

Result<ChoiceTokens> encode_choice(const Tokenizer& tokenizer,
                                   const Choice& choice,
                                   int64_t longest) {
  const size_t end = choice.context.find_last_not_of(" \t\n\r\v\f") + 1;
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<int32_t> context,
                          tokenizer.encode_prompt(choice.context.substr(0, end)));
  ChoiceTokens out;
  NIBBLE_ASSIGN_OR_RETURN(out.tokens,
                          tokenizer.encode_prompt(choice.context + choice.continuation));
  out.first_scored = std::ssize(context);
  const int64_t excess = std::ssize(out.tokens) - 1 - longest;
  if (excess > 0) {
    out.tokens.erase(out.tokens.begin(), out.tokens.begin() + excess);
    out.first_scored -= excess;
  }
  if (out.first_scored < 1 || out.first_scored >= std::ssize(out.tokens)) {
    return make_error(StatusCode::kInvalidArgument,
                      "the continuation '{}' has {} tokens after {} of its context; it needs one, "
                      "and {} at most fit",
                      choice.continuation, std::ssize(out.tokens) - out.first_scored,
                      out.first_scored, longest);
  }
  return out;
}

Result<Scores> score_choices(LogitReader& reader, Items items, const ScoringRun& run) {
  Scores scores;
  for (const auto& choices : items) {
    scores.emplace_back(choices.size());
  }
  const auto group = static_cast<size_t>(reader.options().sequences);
  for (size_t begin = 0; begin < items.size(); begin += group) {
    const size_t count = std::min(group, items.size() - begin);
    NIBBLE_RETURN_IF_ERROR(score_group(reader, items.subspan(begin, count),
                                       std::span(scores).subspan(begin, count), run.pool));
    run.progress(static_cast<int64_t>(begin + count));
  }
  return scores;
}

}  // namespace nibble
