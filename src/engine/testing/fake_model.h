#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "model/model.h"
#include "ops/dynamic_rope.h"
#include "ops/sampler.h"
#include "ops/token_mask.h"

namespace nibble {

/// A model for tests of everything above it. Keys hold the token, values its position and, with
/// dynamic NTK scaling, the length that it is rotated for; logits are a hash of all tokens of the
/// sequence, read back from the pages: a wrong, stale or wrongly shared page changes the text or
/// trips a CHECK.
class FakeModel final : public Model {
 public:
  /// Special tokens of the fake world.
  static constexpr int32_t kEos = 1;
  static constexpr int32_t kNanTrigger = 2;    // a prompt that ends with it gets NaN logits
  static constexpr int32_t kErrorTrigger = 3;  // computing it throws InternalError

  explicit FakeModel(int64_t vocab_size = 64, int64_t max_position = 256) {
    config_.architecture = "FakeForTests";
    config_.vocab_size = vocab_size;
    config_.num_layers = 2;
    config_.num_heads = config_.num_kv_heads = 2;
    config_.head_dim = 2;
    config_.hidden_size = 4;
    config_.max_position = max_position;
    config_.eos_token_ids = {kEos};
  }

  /// Gives its layers windows: one for each, 0 for none.
  void set_windows(std::vector<int64_t> windows) {
    config_.num_layers = std::ssize(windows);
    config_.sliding_windows = std::move(windows);
  }

  /// Overwrites a page, whose tokens nobody may read any more.
  void poison(int64_t pool, int32_t page) const {
    for (int64_t layer = 0; cache_ != nullptr && layer < config_.num_layers; ++layer) {
      const KvView view = cache_->view(layer);
      if (view.pool == pool) {
        std::memset(view.keys(page, 0), 0xa5, static_cast<size_t>(view.page_bytes()));
      }
    }
  }

  /// Has it scale rotations of sequences that are longer than `original`.
  void set_dynamic_rope(int64_t original) {
    config_.rope.kind = RopeKind::kDynamicNtk;
    config_.rope.factor = 2.0;
    config_.rope.original_max_position = original;
  }

  /// Has its logits differ from those of other fakes after about one token in `every`.
  void set_differs(uint64_t every) { differs_ = every; }

  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::string_view scheme() const override { return "fake"; }
  [[nodiscard]] int64_t weight_bytes() const override { return 0; }
  /// Sleeps in each forward(), so that tests can act while a step runs.
  void set_step_time(std::chrono::microseconds time) { step_time_ = time; }
  [[nodiscard]] int64_t largest_batch() const { return largest_batch_; }
  /// Steps with tokens until now, and how many of them were to warm up.
  [[nodiscard]] int64_t steps() const { return steps_; }
  [[nodiscard]] int64_t warm_up_steps() const { return warm_up_steps_; }

  /// Has it sample tokens, as models on GPUs do, with results that come late.
  void set_sampling(bool sampling) { sampling_ = sampling; }
  [[nodiscard]] int64_t fed_steps() const { return fed_steps_; }
  [[nodiscard]] bool samples_tokens() const override { return sampling_; }
  /// Models that sample tokens, as those on GPUs.
  [[nodiscard]] bool first_steps_are_slow() const override { return sampling_; }

  void start(const StepInput& batch, PagedKvCache& cache, const SamplingInput& input) override {
    CHECK_LT(started_.size(), size_t{2});
    if (batch.tokens.empty()) {
      sample(input);
      return;
    }
    StepInput fed = batch;
    if (batch.fed) {
      ++fed_steps_;
      CHECK_EQ(batch.tokens.size(), last_tokens_.size());
      fed.tokens = last_tokens_;
    }
    const auto vocab = static_cast<size_t>(config_.vocab_size);
    CHECK(unsampled_.empty());
    std::vector<float> logits(batch.logit_rows.size() * vocab);
    forward(fed, cache, logits);
    unsampled_ = std::move(logits);
    if (!input.rows.empty() || batch.logit_rows.empty()) {
      CHECK_EQ(input.rows.size(), batch.logit_rows.size());
      sample(input);
    }
  }

  void sample(const SamplingInput& input) {
    const auto vocab = static_cast<size_t>(config_.vocab_size);
    std::vector<float> logits = std::move(unsampled_);
    unsampled_.clear();
    CHECK_EQ(logits.size(), input.rows.size() * vocab);
    for (const LogitEdit& edit : input.edits) {
      float& logit =
          logits[static_cast<size_t>(edit.row) * vocab + static_cast<size_t>(edit.token)];
      const float biased = logit + edit.bias;
      logit = (biased > 0 ? biased / edit.repetition : biased * edit.repetition) - edit.penalty;
    }
    const auto words = static_cast<size_t>(mask_words(config_.vocab_size));
    for (size_t row = 0; row < input.mask_of.size(); ++row) {
      for (size_t token = 0; input.mask_of[row] >= 0 && token < vocab; ++token) {
        const auto mask =
            input.masks.subspan(static_cast<size_t>(input.mask_of[row]) * words, words);
        if (!mask_allows(mask, static_cast<int64_t>(token))) {
          logits[row * vocab + token] = -std::numeric_limits<float>::infinity();
        }
      }
    }
    std::vector<SampledRow> samples(input.rows.size());
    std::vector<int32_t> tokens;
    for (size_t row = 0; row < samples.size(); ++row) {
      samples[row] = draw(std::span(logits).subspan(row * vocab, vocab), input.rows[row]);
      tokens.push_back(std::max(samples[row].token, 0));
    }
    last_tokens_ = std::move(tokens);
    started_.push_back(std::move(samples));
  }

  void finish(std::span<SampledRow> out) override {
    CHECK(!started_.empty());
    CHECK_EQ(out.size(), started_.front().size());
    std::ranges::copy(started_.front(), out.begin());
    started_.pop_front();
  }

  void forward(const StepInput& batch, PagedKvCache& cache, std::span<float> logits) override {
    const auto vocab = static_cast<size_t>(config_.vocab_size);
    CHECK_EQ(logits.size(), batch.logit_rows.size() * vocab);
    largest_batch_ = std::max(largest_batch_, static_cast<int64_t>(batch.tokens.size()));
    ++steps_;
    warm_up_steps_ += batch.warm_up ? 1 : 0;
    if (step_time_.count() > 0) {
      std::this_thread::sleep_for(step_time_);
    }
    cache_ = &cache;
    for (size_t sequence = 0; sequence < batch.sequences.size(); ++sequence) {
      write(batch, sequence, cache);
    }
    for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
      write_logits(batch, batch.logit_rows[i], cache, logits.subspan(i * vocab, vocab));
    }
    last_ = batch;
  }

  /// The middle ones of a row's logits.
  void final_states(int64_t first, std::span<float> out) override {
    const auto width = static_cast<size_t>(config_.hidden_size);
    std::vector<float> logits(static_cast<size_t>(config_.vocab_size));
    for (; !out.empty(); out = out.subspan(width)) {
      write_logits(last_, static_cast<int32_t>(first++), *cache_, logits);
      std::copy_n(logits.begin() + std::ssize(logits) / 2, width, out.begin());
    }
  }

 private:
  static SampledRow draw(std::span<float> logits, const RowSampling& by) {
    SamplingParams params;
    params.temperature = by.inverse_temperature == 0 ? 0 : 1.0 / by.inverse_temperature;
    params.top_p = by.top_p;
    params.min_p = by.min_p;
    params.top_k = by.top_k;
    std::ranges::replace(logits, -std::numeric_limits<float>::infinity(), -1e30F);  // banned
    Sampler sampler(std::ssize(logits));
    const std::unordered_map<int32_t, int32_t> seen;
    const auto sampled = sampler.sample(logits, {.params = params,
                                                 .seed = by.seed,
                                                 .step = by.step,
                                                 .seen = seen,
                                                 .banned = {},
                                                 .top_logprobs = -1});
    if (!sampled.ok()) {
      return {.token = -1, .status = SampleStatus::kNotFinite};
    }
    return {.token = sampled->token};
  }

  // Where token `position` of a sequence has its key (or value) in a layer.
  static std::byte* slot(const KvView& view, const SequenceSpan& span, int64_t position, bool key) {
    const int32_t page = span.pages[position / view.page_size];
    std::byte* half = key ? view.keys(page, 1) : view.values(page, 1);
    return half + position % view.page_size * kv_row_bytes(view.code, view.head_dim);
  }

  [[nodiscard]] int64_t window_of(int64_t layer) const {
    const auto index = static_cast<size_t>(layer);
    return index < config_.sliding_windows.size() ? config_.sliding_windows[index] : 0;
  }

  // What the value of a token at `position` must say.
  [[nodiscard]] int32_t value_of(const SequenceSpan& span, int32_t position) const {
    if (config_.rope.kind != RopeKind::kDynamicNtk) {
      return position;
    }
    const int64_t length =
        std::max(rotated_length(span.prompt_len, position), config_.rope.original_max_position);
    return position << 12 | static_cast<int32_t>(length);
  }

  static const SequenceSpan& span_of(const StepInput& batch, size_t sequence, int32_t pool) {
    return sequences_in_pool(batch.sequences, batch.other_pools, pool)[sequence];
  }

  void write(const StepInput& batch, size_t sequence, PagedKvCache& cache) const {
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      const KvView view = cache.view(layer);
      const SequenceSpan& span = span_of(batch, sequence, view.pool);
      for (int32_t i = 0; i < span.q_len; ++i) {
        const int32_t position = span.kv_len - span.q_len + i;
        const int32_t token =
            batch.tokens[static_cast<size_t>(span.q_begin) + static_cast<size_t>(i)];
        const int32_t value = value_of(span, position);
        CHECK_NE(token, kErrorTrigger);
        std::memcpy(slot(view, span, position, true), &token, sizeof token);
        std::memcpy(slot(view, span, position, false), &value, sizeof value);
      }
    }
  }

  void write_logits(const StepInput& batch,
                    int32_t row,
                    const PagedKvCache& cache,
                    std::span<float> logits) const {
    for (size_t sequence = 0; sequence < batch.sequences.size(); ++sequence) {
      const SequenceSpan& span = batch.sequences[sequence];
      if (row < span.q_begin || row >= span.q_begin + span.q_len) {
        continue;
      }
      uint64_t hash = 14695981039346656037ULL;
      const int32_t last = span.kv_len - span.q_len + row - span.q_begin;
      int32_t token = 0;
      for (int32_t position = 0; position <= last; ++position) {
        for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
          const KvView view = cache.view(layer);
          const int64_t window = window_of(layer);
          if (window > 0 && position <= last - window) {
            continue;
          }
          const SequenceSpan& pages = span_of(batch, sequence, view.pool);
          int32_t stored = 0;
          std::memcpy(&token, slot(view, pages, position, true), sizeof token);
          std::memcpy(&stored, slot(view, pages, position, false), sizeof stored);
          CHECK_EQ(stored, value_of(span, position));
          hash = (hash ^ static_cast<uint32_t>(token)) * 1099511628211ULL;
        }
      }
      if (differs_ > 0 && (hash >> 32) % differs_ == 0) {
        ++hash;
      }
      for (size_t v = 0; v < logits.size(); ++v) {
        uint64_t x = (hash ^ (v + 1)) * 0x9e3779b97f4a7c15ULL;
        x ^= x >> 29;
        x *= 0xbf58476d1ce4e5b9ULL;
        logits[v] = static_cast<float>(x >> 40) * 0x1.0p-22F;  // 0 to 4
      }
      logits[kNanTrigger] = logits[kErrorTrigger] = -200.0F;  // only prompts have these
      if (token == kNanTrigger) {
        logits[logits.size() / 2] = std::numeric_limits<float>::quiet_NaN();
      }
      return;
    }
    CHECK_MSG(false, "row {} is in no sequence", row);
  }

  ModelConfig config_;
  const PagedKvCache* cache_ = nullptr;  // of the last step
  std::chrono::microseconds step_time_{0};
  int64_t largest_batch_ = 0;
  int64_t steps_ = 0;
  int64_t warm_up_steps_ = 0;
  bool sampling_ = false;
  int64_t fed_steps_ = 0;
  uint64_t differs_ = 0;
  std::vector<int32_t> last_tokens_;  // sampled by the step started last
  std::vector<float> unsampled_;      // logits of the step started last
  std::deque<std::vector<SampledRow>> started_;
  StepInput last_;
};

}  // namespace nibble
