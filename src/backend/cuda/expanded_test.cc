#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cuda/expanded_latents.h"
#include "backend/cuda/latent.h"
#include "backend/cuda/testing/heads_bench.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::HeadsBench;
using testing::random_bits;
using testing::random_values;

constexpr int32_t kRowDim = kExpandedRank + kExpandedRope;
constexpr int32_t kQueryDim = kExpandedNope + kExpandedRope;
constexpr double kTolerance = 1e-2;       // keys, values, weights and results are rounded to bf16
constexpr double kAbsorbedGap = 2e-2;     // both forms round, each elsewhere
constexpr double kCodedGap = 5e-2;        // and the absorbed form rounds queries to codes
constexpr float kWeightSpread = 0.0442F;  // 1 / sqrt(kExpandedRank): keys and values of about 1

#define NIBBLE_NEEDS_HOPPER()                               \
  NIBBLE_NEEDS_GPU();                                       \
  if (!query_device(0)->hopper()) {                         \
    GTEST_SKIP() << "the kernels are made for sm_90 alone"; \
  }

struct TestSequence {
  int32_t q_len;
  int32_t kv_len;
};

/// One step: random rows in scattered pages, whose other memory is NaNs, queries, and the matrices
/// of a layer.
class ExpandedCase {
 public:
  ExpandedCase(HeadsBench& bench,
               const LatentShape& shape,
               const std::vector<TestSequence>& sequences)
      : bench_(bench), shape_(shape) {
    int32_t longest = 0;
    int32_t row = 0;
    for (const TestSequence& sequence : sequences) {
      sequences_.push_back({.sequence = static_cast<int32_t>(sequences_.size()),
                            .first_row = row,
                            .rows = sequence.q_len,
                            .kv_len = sequence.kv_len});
      row += sequence.q_len;
      longest = std::max(longest, sequence.kv_len);
    }
    rows_ = row;
    stride_ = (longest + shape.page_size - 1) / shape.page_size + 1;
    fill_pages();
    make_step();
    const auto heads = static_cast<size_t>(shape.heads);
    const size_t matrix = size_t{kExpandedRank} * kExpandedNope;
    keys_ = random_bits(heads * matrix, 21, kWeightSpread);
    values_ = random_bits(heads * matrix, 22, kWeightSpread);
    prepared_keys_ = bench.prepare(keys_, kExpandedRank, kExpandedNope);
    prepared_values_ = bench.prepare(values_, kExpandedValue, kExpandedRank);
    const auto queries = static_cast<size_t>(rows_) * heads;
    q_ = random_bits(queries * kQueryDim, 31);
    rotated_.assign(queries * kRowDim, 0xffff);
    const std::vector<uint16_t> rotated = random_bits(queries * kExpandedRope, 32);
    for (size_t i = 0; i < queries; ++i) {  // what is not rotated yet is nobody's to read
      std::copy_n(rotated.begin() + static_cast<int64_t>(i) * kExpandedRope, kExpandedRope,
                  rotated_.begin() + static_cast<int64_t>(i) * kRowDim + kExpandedRank);
      std::fill_n(q_.begin() + static_cast<int64_t>(i) * kQueryDim + kExpandedNope, kExpandedRope,
                  0xffff);
    }
    device_q_ = std::make_unique<DeviceArray<uint16_t>>(q_);
    device_rotated_ = std::make_unique<DeviceArray<uint16_t>>(rotated_);
    attended_ = std::make_unique<DeviceArray<uint16_t>>(queries * kRowDim);
    out_ = std::make_unique<DeviceArray<uint16_t>>(queries * kExpandedValue);
  }

  /// [rows, heads, kExpandedValue], in pieces of so many tokens, over poisoned memory.
  std::vector<uint16_t> run(int32_t piece_tokens) {
    const ExpandedLatents::Sizes sizes{
        .heads = shape_.heads, .piece_tokens = piece_tokens, .sequences = step_.sequences};
    auto expanded = ExpandedLatents::create(sizes);
    EXPECT_TRUE(expanded.ok()) << expanded.status().message();
    EXPECT_TRUE(fill_device(out_->data(), 0xff, out_->bytes()).ok());
    EXPECT_TRUE(fill_device(attended_->data(), 0xff, attended_->bytes()).ok());
    const ExpandedLatentArgs args = this->args();
    EXPECT_TRUE((*expanded)->takes(args));
    (*expanded)->run(args, sequences_, step_, bench_.stream);
    EXPECT_EQ(cudaStreamSynchronize(bench_.stream), cudaSuccess);
    return out_->host();
  }

  /// The same in the absorbed form.
  std::vector<uint16_t> run_absorbed() {
    const DeviceArray<uint16_t> queries(rotated_);
    const auto width = static_cast<int64_t>(shape_.heads) * kRowDim;
    prepared_keys_->run({.x = {device_q_->data(), DType::kBF16},
                         .x_stride = int64_t{shape_.heads} * kQueryDim,
                         .x_head = kQueryDim,
                         .m = rows_,
                         .y = {queries.data(), DType::kBF16},
                         .y_stride = width,
                         .y_head = kRowDim});
    attend_absorbed(queries.data(), step_);
    prepared_values_->run({.x = {attended_->data(), DType::kBF16},
                           .x_stride = width,
                           .x_head = kRowDim,
                           .m = rows_,
                           .y = {out_->data(), DType::kBF16},
                           .y_stride = int64_t{shape_.heads} * kExpandedValue,
                           .y_head = kExpandedValue});
    EXPECT_EQ(cudaStreamSynchronize(bench_.stream), cudaSuccess);
    return out_->host();
  }

  /// Rows that absorbed attention writes when it leaves sequences out.
  std::set<int32_t> rows_without(const std::vector<int32_t>& left_out) {
    auto expanded = ExpandedLatents::create(
        {.heads = shape_.heads, .piece_tokens = kExpandedTile, .sequences = step_.sequences});
    EXPECT_TRUE(expanded.ok());
    EXPECT_TRUE(fill_device(attended_->data(), 0xff, attended_->bytes()).ok());
    std::vector<uint16_t> numbers(rotated_.size(), 0);
    const DeviceArray<uint16_t> queries(numbers);
    StepMetadata step = step_;
    step.kv_len = (*expanded)->lengths_without(left_out, step_, bench_.stream);
    attend_absorbed(queries.data(), step);
    EXPECT_EQ(cudaStreamSynchronize(bench_.stream), cudaSuccess);
    const std::vector<uint16_t> written = attended_->host();
    std::set<int32_t> rows;
    const size_t width = static_cast<size_t>(shape_.heads) * kRowDim;
    for (int32_t row = 0; row < rows_; ++row) {
      const auto from = written.begin() + static_cast<int64_t>(static_cast<size_t>(row) * width);
      if (std::any_of(from, from + static_cast<int64_t>(width),
                      [](uint16_t bits) { return bits != 0xffff; })) {
        rows.insert(row);
      }
    }
    return rows;
  }

  /// Compares results with sums in double precision: the first and last rows of each sequence and
  /// of its blocks of rows and warpgroups, for the first, a middle and the last head.
  void check(const std::vector<uint16_t>& output) const {
    const std::set<int32_t> heads = {0, shape_.heads / 2, shape_.heads - 1};
    for (const ExpandedSequence& sequence : sequences_) {
      std::set<int32_t> rows;
      for (const int32_t row : {0, 1, 7, 8, 15, 16, 63, 64, 127, 128, 129, 255, 256, 400}) {
        rows.insert(std::min(row, sequence.rows - 1));
      }
      rows.insert(sequence.rows - 1);
      for (const int32_t head : heads) {
        const Expanded expanded = expand(sequence, head);
        for (const int32_t row : rows) {
          check_row(output, sequence, head, row, expanded);
        }
      }
    }
  }

  /// ‖a − b‖ / ‖b‖ of the worst head of a row.
  [[nodiscard]] double largest_gap(const std::vector<uint16_t>& a,
                                   const std::vector<uint16_t>& b) const {
    double largest = 0.0;
    for (size_t at = 0; at < a.size(); at += kExpandedValue) {
      double gap = 0.0;
      double size = 0.0;
      for (size_t i = at; i < at + kExpandedValue; ++i) {
        const double difference = bf16_to_f32(a[i]) - bf16_to_f32(b[i]);
        gap += difference * difference;
        size += static_cast<double>(bf16_to_f32(b[i])) * bf16_to_f32(b[i]);
      }
      const double relative = std::sqrt(gap / size);
      largest = relative <= largest ? largest : relative;  // a NaN too
    }
    return largest;
  }

 private:
  /// Keys and values of a head.
  struct Expanded {
    std::vector<double> keys;    // [tokens, kQueryDim]
    std::vector<double> values;  // [tokens, kExpandedValue]
  };

  [[nodiscard]] ExpandedLatentArgs args() const {
    KvView kv{.code = shape_.code,
              .page_size = shape_.page_size,
              .kv_heads = 1,
              .head_dim = kRowDim,
              .latent_rank = kExpandedRank};
    kv.pages = reinterpret_cast<std::byte*>(pages_->data());
    return {.heads = shape_.heads,
            .nope_dim = kExpandedNope,
            .value_dim = kExpandedValue,
            .scale = shape_.scale,
            .q = {device_q_->data(), DType::kBF16},
            .q_stride = int64_t{shape_.heads} * kQueryDim,
            .rotated = {device_rotated_->data(), DType::kBF16},
            .unfinished = {attended_->data(), DType::kBF16},
            .out = {out_->data(), DType::kBF16},
            .keys = prepared_keys_.get(),
            .values = prepared_values_.get(),
            .kv = kv};
  }

  void attend_absorbed(const void* queries, const StepMetadata& step) {
    const DeviceArray<uint8_t> plan(latent_plan_bytes(shape_, step.sequences, step.rows));
    const DeviceArray<uint8_t> workspace(latent_workspace_bytes(shape_, step.sequences) + 1);
    ASSERT_EQ(plan_latent(shape_, step, plan.data(), {bench_.stream}), cudaSuccess);
    const auto width = static_cast<int64_t>(shape_.heads) * kRowDim;
    const LatentLaunch launch{.shape = shape_,
                              .step = step,
                              .plan = plan.data(),
                              .pages = pages_->data(),
                              .q = queries,
                              .q_stride = width,
                              .out = attended_->data(),
                              .out_stride = width,
                              .workspace = workspace.data()};
    ASSERT_EQ(decode_latent(launch, {bench_.stream, false}), cudaSuccess);
    if (step.rows > step.sequences) {
      ASSERT_EQ(prefill_latent(launch, {bench_.stream}), cudaSuccess);
    }
    ASSERT_EQ(cudaStreamSynchronize(bench_.stream), cudaSuccess);
  }

  void fill_pages() {
    std::vector<int32_t> ids((sequences_.size() + 1) * static_cast<size_t>(stride_));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    table_ = ids;
    const auto page_bytes = static_cast<size_t>(latent_page_bytes(shape_));
    std::vector<uint8_t> pages(ids.size() * page_bytes, 0xff);
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const auto length = static_cast<size_t>(sequences_[s].kv_len);
      cached_.push_back(random_values(length * kRowDim, 100 + static_cast<uint32_t>(s), 1.0F));
      for (size_t token = 0; token < length; ++token) {
        const auto page =
            static_cast<size_t>(table_[s * static_cast<size_t>(stride_) +
                                       token / static_cast<size_t>(shape_.page_size)]);
        store_row(std::span(cached_.back()).subspan(token * kRowDim, kRowDim),
                  static_cast<int32_t>(token), pages.data() + page * page_bytes);
      }
    }
    pages_ = std::make_unique<DeviceArray<uint8_t>>(pages.size());
    EXPECT_TRUE(copy_to_device(pages_->data(), pages.data(), pages_->bytes()).ok());
  }

  /// Stores a row in a page as the cache's format has it; the row becomes what the page says.
  void store_row(std::span<float> row, int32_t token, uint8_t* page) const {
    const int32_t slot = token % shape_.page_size;
    const auto put = [&](size_t dim, const auto& value) {
      std::memcpy(page + latent_offset(shape_, slot, static_cast<int32_t>(dim)), &value,
                  sizeof(value));
    };
    uint8_t* const params = page + latent_params_offset(shape_, slot);
    const float size = 0.5F * static_cast<float>(1 + token % 3);
    for (size_t d = 0; d < kRowDim; ++d) {
      float& number = row[d];
      if (!shape_.coded() || d >= kExpandedRank) {
        const uint16_t bits = f32_to_bf16(number);
        put(d, bits);
        number = bf16_to_f32(bits);
      } else if (shape_.code == KvCode::kInt8) {
        const float scale = size / 32.0F;
        const auto code = static_cast<int8_t>(std::clamp(number * 32.0F, -127.0F, 127.0F));
        put(d, code);
        std::memcpy(params, &scale, sizeof(scale));
        number = static_cast<float>(code) * scale;
      } else if (shape_.code == KvCode::kFp8) {
        const uint8_t code = encode_e4m3(number * 64.0F);
        const float scale = size / 64.0F;
        put(d, code);
        std::memcpy(params, &scale, sizeof(scale));
        number = decode_e4m3(code) * scale;
      } else {
        const uint16_t line[2] = {f32_to_f16(size / 4.0F), f32_to_f16(-2.0F * size)};
        const auto code = static_cast<uint8_t>(std::clamp(number * 4.0F + 8.0F, 0.0F, 15.0F));
        uint8_t& byte = page[latent_offset(shape_, slot, static_cast<int32_t>(d))];
        byte = static_cast<uint8_t>(d % 2 == 0 ? code : byte | code << 4);
        std::memcpy(params + d / 128 * 4, line, sizeof(line));
        number = static_cast<float>(code) * f16_to_f32(line[0]) + f16_to_f32(line[1]);
      }
    }
  }

  void make_step() {
    std::vector<int32_t> begin;
    std::vector<int32_t> length;
    std::vector<int32_t> position;
    std::vector<int32_t> owner;
    for (const ExpandedSequence& sequence : sequences_) {
      begin.push_back(sequence.first_row);
      length.push_back(sequence.kv_len);
      for (int32_t i = 0; i < sequence.rows; ++i) {
        position.push_back(sequence.kv_len - sequence.rows + i);
        owner.push_back(sequence.sequence);
      }
    }
    begin.push_back(rows_);
    q_begin_ = std::make_unique<DeviceArray<int32_t>>(begin);
    kv_len_ = std::make_unique<DeviceArray<int32_t>>(length);
    position_ = std::make_unique<DeviceArray<int32_t>>(position);
    owner_ = std::make_unique<DeviceArray<int32_t>>(owner);
    device_table_ = std::make_unique<DeviceArray<int32_t>>(table_);
    step_ = {.q_begin = q_begin_->data(),
             .kv_len = kv_len_->data(),
             .page_table = device_table_->data(),
             .page_table_stride = stride_,
             .row_position = position_->data(),
             .row_sequence = owner_->data(),
             .sequences = static_cast<int32_t>(length.size()),
             .rows = rows_};
  }

  [[nodiscard]] Expanded expand(const ExpandedSequence& sequence, int32_t head) const {
    const std::vector<float>& cached = cached_[static_cast<size_t>(sequence.sequence)];
    std::vector<float> keys(size_t{kExpandedRank} * kExpandedNope);
    std::vector<float> values(size_t{kExpandedRank} * kExpandedValue);  // [value, latent]
    const auto begin = static_cast<int64_t>(keys.size()) * head;
    std::transform(keys_.begin() + begin, keys_.begin() + begin + std::ssize(keys), keys.begin(),
                   bf16_to_f32);
    std::transform(values_.begin() + begin, values_.begin() + begin + std::ssize(values),
                   values.begin(), bf16_to_f32);
    Expanded out;
    for (int32_t token = 0; token < sequence.kv_len; ++token) {
      const std::vector<float> row(cached.begin() + int64_t{token} * kRowDim,
                                   cached.begin() + int64_t{token + 1} * kRowDim);
      std::vector<double> key(kExpandedNope, 0.0);
      for (size_t j = 0; j < kExpandedRank; ++j) {
        for (size_t i = 0; i < kExpandedNope; ++i) {
          key[i] += static_cast<double>(row[j]) * keys[j * kExpandedNope + i];
        }
      }
      out.keys.insert(out.keys.end(), key.begin(), key.end());
      out.keys.insert(out.keys.end(), row.begin() + kExpandedRank, row.end());
      for (size_t i = 0; i < kExpandedValue; ++i) {
        out.values.push_back(
            std::inner_product(row.begin(), row.begin() + kExpandedRank,
                               values.begin() + static_cast<int64_t>(i) * kExpandedRank, 0.0));
      }
    }
    return out;
  }

  void check_row(const std::vector<uint16_t>& output,
                 const ExpandedSequence& sequence,
                 int32_t head,
                 int32_t row,
                 const Expanded& expanded) const {
    const auto index =
        static_cast<size_t>(sequence.first_row + row) * static_cast<size_t>(shape_.heads) +
        static_cast<size_t>(head);
    std::vector<double> query;
    for (size_t i = 0; i < kQueryDim; ++i) {
      query.push_back(bf16_to_f32(
          i < kExpandedNope ? q_[index * kQueryDim + i]
                            : rotated_[index * kRowDim + kExpandedRank + i - kExpandedNope]));
    }
    const auto seen = static_cast<size_t>(sequence.kv_len - sequence.rows + row + 1);
    std::vector<double> weights;
    for (size_t token = 0; token < seen; ++token) {
      weights.push_back(
          std::inner_product(query.begin(), query.end(),
                             expanded.keys.begin() + static_cast<int64_t>(token) * kQueryDim, 0.0));
    }
    const double top = *std::max_element(weights.begin(), weights.end());
    double total = 0.0;
    std::vector<double> want(kExpandedValue, 0.0);
    for (size_t token = 0; token < seen; ++token) {
      const double weight = std::exp((weights[token] - top) * shape_.scale);
      total += weight;
      for (size_t i = 0; i < kExpandedValue; ++i) {
        want[i] += weight * expanded.values[token * kExpandedValue + i];
      }
    }
    double gap = 0.0;
    double size = 0.0;
    for (size_t i = 0; i < kExpandedValue; ++i) {
      const double value = want[i] / total;
      const double difference = bf16_to_f32(output[index * kExpandedValue + i]) - value;
      gap += difference * difference;
      size += value * value;
    }
    ASSERT_LT(std::sqrt(gap / size), kTolerance)
        << "sequence " << sequence.sequence << ", row " << row << ", head " << head;
  }

  HeadsBench& bench_;
  LatentShape shape_;
  std::vector<ExpandedSequence> sequences_;
  int32_t rows_ = 0;
  int32_t stride_ = 0;  // pages of a sequence in the table
  std::vector<int32_t> table_;
  std::vector<std::vector<float>> cached_;  // [sequences][kv_len, kRowDim]
  std::vector<uint16_t> keys_, values_, q_, rotated_;
  std::unique_ptr<PreparedHeads> prepared_keys_, prepared_values_;
  StepMetadata step_;
  std::unique_ptr<DeviceArray<int32_t>> q_begin_, kv_len_, position_, owner_, device_table_;
  std::unique_ptr<DeviceArray<uint16_t>> device_q_, device_rotated_, attended_, out_;
  std::unique_ptr<DeviceArray<uint8_t>> pages_;
};

LatentShape shape_of(int32_t heads, int32_t page_size = 64) {
  return {.page_size = page_size,
          .row_dim = kRowDim,
          .rope_dim = kExpandedRope,
          .heads = heads,
          .scale = 1.0F / std::sqrt(static_cast<float>(kQueryDim))};
}

void check_case(HeadsBench& bench,
                const LatentShape& shape,
                const std::vector<TestSequence>& sequences,
                int32_t piece_tokens) {
  SCOPED_TRACE(fmt::format("{} heads, pages of {}, first {} rows of {}, pieces of {}", shape.heads,
                           shape.page_size, sequences.front().q_len, sequences.front().kv_len,
                           piece_tokens));
  ExpandedCase test(bench, shape, sequences);
  const std::vector<uint16_t> first = test.run(piece_tokens);
  test.check(first);
  if (!testing::brief_tests()) {
    EXPECT_EQ(first, test.run(piece_tokens)) << "two runs differ";
    EXPECT_LT(test.largest_gap(first, test.run_absorbed()),
              shape.coded() ? kCodedGap : kAbsorbedGap);
  }
}

TEST(Expanded, AnyNumberOfRows) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  for (int32_t rows = 1; rows <= 17; ++rows) {
    check_case(bench, shape_of(5), {{rows, rows}}, 1024);
    check_case(bench, shape_of(5), {{rows, 130 + rows}}, 1024);
  }
  for (const int32_t rows : {63, 64, 65, 127, 128, 129, 700}) {
    check_case(bench, shape_of(5), {{rows, rows}}, 1024);
    check_case(bench, shape_of(5), {{rows, rows + 77}}, 1024);
  }
}

TEST(Expanded, AnyNumberOfHeadsAndPageSizes) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  for (const int32_t heads : {1, 5, 16, 64}) {
    for (const int32_t page : {16, 64}) {
      check_case(bench, shape_of(heads, page), {{65, 200}}, 512);
      check_case(bench, shape_of(heads, page), {{129, 129}}, 512);
    }
  }
}

TEST(Expanded, SequencesInPieces) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  check_case(bench, shape_of(5), {{700, 700}}, 256);    // three, over the rows themselves
  check_case(bench, shape_of(5), {{129, 1290}}, 512);   // three, in front of most rows
  check_case(bench, shape_of(5), {{1000, 1290}}, 512);  // both
  check_case(bench, shape_of(3), {{300, 301}}, 128);
  check_case(bench, shape_of(16), {{17, 385}}, 128);
  check_case(bench, shape_of(64), {{70, 600}}, 256);
}

TEST(Expanded, CachesInCodes) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  for (const KvCode code : {KvCode::kFp8, KvCode::kInt8, KvCode::kInt4}) {
    LatentShape shape = shape_of(5);
    shape.code = code;
    check_case(bench, shape, {{129, 300}, {65, 65}}, 256);
    shape.page_size = 128;
    check_case(bench, shape, {{70, 500}}, 1024);
  }
}

TEST(Expanded, SequencesShareAPiece) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  check_case(bench, shape_of(5), {{65, 65}, {129, 300}, {1, 1}, {200, 400}}, 1024);
  check_case(bench, shape_of(5, 16), {{300, 700}, {65, 65}, {64, 640}}, 384);
  std::vector<TestSequence> many;  // more than a piece lists
  for (int32_t i = 0; i < 40; ++i) {
    many.push_back({1 + i * 7 % 90, 90 + i});
  }
  check_case(bench, shape_of(2), many, 8192);
}

TEST(Expanded, PiecesChangeRoundingAlone) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  ExpandedCase test(bench, shape_of(5), {{300, 900}});
  const std::vector<uint16_t> whole = test.run(1024);
  EXPECT_LT(test.largest_gap(test.run(384), whole), kTolerance);
}

TEST(Expanded, AbsorbedAttentionLeavesSequencesOut) {
  NIBBLE_NEEDS_HOPPER();
  HeadsBench bench;
  ExpandedCase test(bench, shape_of(5), {{1, 70}, {130, 200}, {1, 3}, {140, 140}, {70, 300}});
  std::set<int32_t> kept = test.rows_without({1, 4});
  std::set<int32_t> want = {0, 131};
  for (int32_t row = 132; row < 272; ++row) {
    want.insert(row);
  }
  EXPECT_EQ(kept, want);
}

TEST(Expanded, OtherFormsAreNotTaken) {
  NIBBLE_NEEDS_HOPPER();
  StepLimits limits{.rows = 64,
                    .sequences = 4,
                    .logit_rows = 4,
                    .positions = 1000,
                    .latent_heads = 16,
                    .latent_row = 576,
                    .latent_key = 128,
                    .latent_value = 128};
  EXPECT_EQ(ExpandedLatents::sizes(limits).piece_tokens, 1024);
  EXPECT_GT(ExpandedLatents::bytes(ExpandedLatents::sizes(limits)), 1024 * 16 * 512);
  limits.latent_key = 64;
  EXPECT_EQ(ExpandedLatents::sizes(limits).heads, 0);
  limits.latent_key = 128;
  limits.latent_row = 320;
  EXPECT_EQ(ExpandedLatents::bytes(ExpandedLatents::sizes(limits)), 0);
}

}  // namespace
}  // namespace nibble::cuda
