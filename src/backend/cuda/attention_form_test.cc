// AttentionForm::kShared: rotated queries have the CPU's bits, and so have nearly all results.

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cuda/testing/attention_case.h"
#include "base/f16.h"
#include "ops/attention.h"

namespace nibble::cuda {
namespace {

using testing::AttentionCase;
using testing::CaseSequence;

/// The case's step on the CPU.
class CpuStep final {
 public:
  explicit CpuStep(const AttentionCase& test)
      : test_(test), backend_(make_cpu_backend({}).value()), width_(stride_of(test.shape)) {
    const KvLayout& kv = test.shape.kv;
    view_ = {.code = kv.code,
             .page_size = kv.page_size,
             .kv_heads = kv.kv_heads,
             .head_dim = kv.head_dim};
    for (const CaseSequence& sequence : test.sequences) {
      std::vector<int32_t> pages((sequence.kv_len + kv.page_size - 1) / kv.page_size);
      std::ranges::generate(pages, [&] { return pages_++; });
      tables_.push_back(std::move(pages));
    }
    memory_.resize(static_cast<size_t>(view_.page_bytes() * pages_));
    view_.pages = memory_.data();
  }

  /// Queries, keys and values of all tokens as the rotation leaves them.
  std::vector<uint16_t> rotate(const std::vector<float>& frequencies) {
    std::vector<uint16_t> rows(test_.qkv.size());
    std::ranges::transform(test_.qkv, rows.begin(), f32_to_bf16);
    const std::vector<SequenceSpan> spans = spans_of(Rows::kAll);
    backend_->run_step({}, [&](Step& step) {
      step.rope_append_kv({.qkv = {rows.data(), DType::kBF16},
                           .stride = width_,
                           .heads = test_.shape.heads,
                           .inv_freq = frequencies.data(),
                           .kv = view_,
                           .sequences = spans,
                           .form = test_.shape.form,
                           .dynamic = test_.dynamic});
    });
    return rows;
  }

  std::vector<uint16_t> attend(std::vector<uint16_t> queries) {
    const int64_t width = int64_t{test_.shape.heads} * test_.shape.kv.head_dim;
    std::vector<uint16_t> out(queries.size());
    const std::vector<SequenceSpan> spans = spans_of(Rows::kStep);
    backend_->run_step({}, [&](Step& step) {
      step.attention({.q = {queries.data(), DType::kBF16},
                      .q_stride = width,
                      .out = {out.data(), DType::kBF16},
                      .out_stride = width,
                      .heads = test_.shape.heads,
                      .scale = test_.shape.scale,
                      .sliding_window = test_.shape.sliding_window,
                      .kv = view_,
                      .sequences = spans,
                      .form = test_.shape.form});
    });
    return out;
  }

  /// An element of the BF16 cache that rotate() has filled.
  [[nodiscard]] double key(int32_t sequence, int32_t token, int32_t head, int32_t d) const {
    const int32_t page =
        tables_[static_cast<size_t>(sequence)][static_cast<size_t>(token / view_.page_size)];
    const auto* rows = reinterpret_cast<const uint16_t*>(view_.keys(page, head));
    return bf16_to_f32(rows[token % view_.page_size * view_.head_dim + d]);
  }

 private:
  enum class Rows { kAll, kStep };
  static int64_t stride_of(const AttentionShape& shape) {
    return int64_t{shape.heads + 2 * shape.kv.kv_heads} * shape.kv.head_dim;
  }
  [[nodiscard]] std::vector<SequenceSpan> spans_of(Rows rows) const {
    std::vector<SequenceSpan> spans;
    int32_t begin = 0;
    for (size_t s = 0; s < tables_.size(); ++s) {
      const CaseSequence& sequence = test_.sequences[s];
      const int32_t count = rows == Rows::kAll ? sequence.kv_len : sequence.q_len;
      spans.push_back({begin, count, sequence.kv_len, tables_[s].data(), sequence.prompt_len});
      begin += count;
    }
    return spans;
  }

  const AttentionCase& test_;
  std::unique_ptr<Backend> backend_;
  const int64_t width_;
  KvView view_;
  int32_t pages_ = 0;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::byte> memory_;
};

/// Of queries that fill_cache() has rotated in place among all tokens' rows.
double share_of_other_queries(const AttentionCase& test, const std::vector<uint16_t>& expected) {
  const std::vector<uint16_t> actual = test.device_qkv->host();
  const auto heads = static_cast<size_t>(test.shape.heads);
  const auto stride = heads + 2 * static_cast<size_t>(test.shape.kv.kv_heads);
  const auto dim = static_cast<size_t>(test.shape.kv.head_dim);
  size_t others = 0;
  size_t count = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (i / dim % stride < heads) {
      others += actual[i] != expected[i] ? 1 : 0;
      ++count;
    }
  }
  return static_cast<double>(others) / static_cast<double>(count);
}

double share_of_others(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  size_t others = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    others += a[i] != b[i] ? 1 : 0;
  }
  return static_cast<double>(others) / static_cast<double>(a.size());
}

struct FormCase {
  int head_dim;
  int window;
  int32_t longest;
  std::vector<CaseSequence> sequences;
};

TEST(AttentionFormShared, GivesTheCpusResults) {
  NIBBLE_NEEDS_GPU();
  const std::vector<CaseSequence> decoded = {{1, 1}, {1, 16}, {1, 17}, {1, 300}, {1, 1000}};
  const std::vector<CaseSequence> prompts = {{5, 5}, {100, 130}, {300, 300}, {60, 500}};
  for (const FormCase& form : {FormCase{64, 0, INT32_MAX, decoded},
                               {128, 0, INT32_MAX, decoded},
                               {128, 0, INT32_MAX, {{1, 5000}, {1, 2100}}},
                               {64, 0, kShortAttention, {{1, 60}, {1, 1000}}},
                               {128, 0, kShortAttention, {{1, 60}, {1, 1000}}},
                               {128, 100, INT32_MAX, decoded},
                               {64, 0, INT32_MAX, prompts},
                               {128, 0, INT32_MAX, prompts},
                               {128, 100, INT32_MAX, prompts},
                               {256, 0, INT32_MAX, prompts}}) {
    AttentionShape shape;
    shape.kv = {KvCode::kBf16, 64, 2, form.head_dim};
    shape.heads = 8;
    shape.scale = 1.0F / std::sqrt(static_cast<float>(form.head_dim));
    shape.sliding_window = form.window;
    double shares[2];
    double queries = 0.0;
    for (const AttentionForm kind : {AttentionForm::kOwn, AttentionForm::kShared}) {
      shape.form = kind;
      AttentionCase test(shape, form.sequences, 11);
      test.longest = form.longest;
      test.fill_cache();
      test.run({nullptr, false});
      CpuStep cpu(test);
      queries = share_of_other_queries(test, cpu.rotate(test.inv_freq->host()));
      const std::vector<uint16_t> out = cpu.attend(test.q->host());
      std::vector<uint16_t> actual = test.out->host();
      size_t real = 0;  // rows past the step's are padding
      for (const CaseSequence& sequence : form.sequences) {
        real += static_cast<size_t>(sequence.q_len * shape.heads * form.head_dim);
      }
      actual.resize(real);
      shares[static_cast<int>(kind)] =
          share_of_others(actual, {out.begin(), out.begin() + static_cast<int64_t>(real)});
    }
    std::printf(
        "dim %d window %d, %zu sequences from %d of %d: %.6f of results differ, %.6f "
        "otherwise\n",
        form.head_dim, form.window, form.sequences.size(), form.sequences[0].q_len,
        form.sequences[0].kv_len, shares[1], shares[0]);
    EXPECT_EQ(queries, 0.0);
    EXPECT_LE(shares[1], 5e-3);
  }
}

/// Elements of a sequence's keys that the cache of fill_cache() has otherwise than the CPU's.
int64_t other_keys(const AttentionCase& test, const CpuStep& cpu, int32_t sequence) {
  const KvLayout& kv = test.shape.kv;
  int64_t others = 0;
  for (int32_t token = 0; token < test.sequences[static_cast<size_t>(sequence)].kv_len; ++token) {
    for (int32_t i = 0; i < kv.kv_heads * kv.head_dim; ++i) {
      const int32_t head = i / kv.head_dim;
      const int32_t d = i % kv.head_dim;
      const double ours = test.cached(sequence, token, head, false, d);
      others += ours != cpu.key(sequence, token, head, d) ? 1 : 0;
    }
  }
  return others;
}

TEST(AttentionFormShared, DynamicRopeHasTheCpusBits) {
  NIBBLE_NEEDS_GPU();
  const int32_t longest = testing::brief_tests() ? 300 : 5000;
  const std::vector<CaseSequence> sequences = {
      {1, longest, 2 * longest / 3}, {1, 300, 100}, {1, 90, 90}, {1, 40, 20}};
  for (const int head_dim : {64, 128, 256}) {
    AttentionShape shape;
    shape.kv = {KvCode::kBf16, 64, 2, head_dim};
    shape.heads = 4;
    shape.form = AttentionForm::kShared;
    AttentionCase test(shape, sequences, 13);
    test.dynamic = {.original = 64, .factor = 8.0};
    test.fill_cache();
    CpuStep cpu(test);
    EXPECT_EQ(share_of_other_queries(test, cpu.rotate(test.inv_freq->host())), 0.0);
    for (int32_t s = 0; s < std::ssize(sequences); ++s) {
      EXPECT_EQ(other_keys(test, cpu, s), 0) << "sequence " << s << ", heads of " << head_dim;
    }
  }
}

}  // namespace
}  // namespace nibble::cuda
