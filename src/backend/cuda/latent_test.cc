#include "backend/cuda/latent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "ops/attention.h"
#include "ops/latent.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

using testing::DeviceArray;
using testing::random_values;

constexpr int32_t kFastDim = 576;
constexpr int32_t kFastValues = 512;
constexpr int32_t kPadding = 2;      // sequences and rows of a graph's bucket that are not there
constexpr double kTolerance = 6e-3;  // weights and results are rounded to bf16

struct TestSequence {
  int32_t q_len;
  int32_t kv_len;
};

std::vector<float> bf16_values(size_t count, uint32_t seed) {
  std::vector<float> values = random_values(count, seed, 1.0F);
  std::ranges::transform(values, values.begin(),
                         [](float x) { return bf16_to_f32(f32_to_bf16(x)); });
  return values;
}

std::vector<uint16_t> bf16_bits(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::ranges::transform(values, bits.begin(), f32_to_bf16);
  return bits;
}

/// One step: random rows in scattered pages on the GPU, whose other memory is NaNs, and the same on
/// the host.
class LatentCase {
 public:
  LatentCase(const LatentShape& shape, std::vector<TestSequence> sequences)
      : shape(shape), sequences_(std::move(sequences)) {
    int32_t longest = 0;
    for (const TestSequence& sequence : sequences_) {
      longest = std::max(longest, sequence.kv_len);
    }
    stride_ = (longest + shape.page_size - 1) / shape.page_size + 1;
    std::vector<int32_t> ids((sequences_.size() + 1) * static_cast<size_t>(stride_));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    table_.assign(ids.begin(), ids.end());
    fill_pages(ids.size());
    make_step();
    const auto numbers = static_cast<size_t>(step_.rows) * width();
    queries = bf16_values(numbers, 11);
    device_queries_ = std::make_unique<DeviceArray<uint16_t>>(bf16_bits(queries));
    out_ = std::make_unique<DeviceArray<uint16_t>>(numbers);
    plan_ = std::make_unique<DeviceArray<uint8_t>>(
        latent_plan_bytes(shape, step_.sequences, step_.rows));
    workspace_ = std::make_unique<DeviceArray<uint8_t>>(latent_workspace_bytes(shape) + 1);
  }

  [[nodiscard]] size_t width() const {
    return static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.row_dim);
  }
  [[nodiscard]] const StepMetadata& step() const { return step_; }
  [[nodiscard]] DeviceArray<uint8_t>& pages() { return *pages_; }
  [[nodiscard]] int32_t page(int32_t sequence, int32_t index) const {
    return table_[static_cast<size_t>(sequence * stride_ + index)];
  }

  /// Other lengths in the same device arrays.
  void change_lengths(const std::vector<int32_t>& lengths) {
    for (size_t s = 0; s < sequences_.size(); ++s) {
      sequences_[s].kv_len = lengths[s];
    }
    std::vector<int32_t> padded = lengths;
    padded.resize(padded.size() + kPadding, 0);
    ASSERT_TRUE(copy_to_device(kv_len_->data(), padded.data(), kv_len_->bytes()).ok());
  }

  void launch(cudaStream_t stream, bool overlap) {
    ASSERT_EQ(plan_latent(shape, step_, plan_->data(), {stream, false}), cudaSuccess);
    const LatentLaunch args{.shape = shape,
                            .step = step_,
                            .plan = plan_->data(),
                            .pages = pages_->data(),
                            .q = device_queries_->data(),
                            .q_stride = static_cast<int64_t>(width()),
                            .out = out_->data(),
                            .out_stride = static_cast<int64_t>(width()),
                            .workspace = workspace_->data()};
    ASSERT_EQ(decode_latent(args, {stream, false}), cudaSuccess);
    if (std::ranges::any_of(sequences_, [](const TestSequence& s) { return s.q_len > 1; })) {
      ASSERT_EQ(prefill_latent(args, {stream, overlap}), cudaSuccess);
    }
  }

  /// The output, over poisoned memory.
  std::vector<uint16_t> run(bool overlap) {
    EXPECT_TRUE(fill_device(out_->data(), 0xff, out_->bytes()).ok());
    launch(nullptr, overlap);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out_->host();
  }
  [[nodiscard]] std::vector<uint16_t> output() const { return out_->host(); }

  /// Compares an output with sums in double precision, head by head.
  void check(const std::vector<uint16_t>& output) const {
    const int32_t values = shape.row_dim == kFastDim ? kFastValues : shape.row_dim;
    const std::vector<float> want = expected();
    for (size_t head = 0; head * static_cast<size_t>(shape.row_dim) < want.size(); ++head) {
      double gap = 0.0;
      double size = 0.0;
      for (int32_t i = 0; i < values; ++i) {
        const size_t at = head * static_cast<size_t>(shape.row_dim) + static_cast<size_t>(i);
        const double difference = bf16_to_f32(output[at]) - want[at];
        gap += difference * difference;
        size += static_cast<double>(want[at]) * want[at];
      }
      ASSERT_LT(std::sqrt(gap / size), kTolerance)
          << "row " << head / static_cast<size_t>(shape.heads) << ", head "
          << head % static_cast<size_t>(shape.heads);
    }
  }

  LatentShape shape;
  std::vector<float> queries;

 private:
  /// Random rows at the places of their tokens, and the same in F32 for the reference.
  void fill_pages(size_t count) {
    const auto page_bytes = static_cast<size_t>(latent_page_bytes(shape));
    const auto dim_count = static_cast<size_t>(shape.row_dim);
    std::vector<uint8_t> pages(count * page_bytes, 0xff);
    host_pages_.assign(count * static_cast<size_t>(shape.page_size) * dim_count, 0.0F);
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const auto length = static_cast<size_t>(sequences_[s].kv_len);
      std::vector<float> rows = bf16_values(length * dim_count, 100 + static_cast<uint32_t>(s));
      for (size_t token = 0; token < length; ++token) {
        const auto place = static_cast<int32_t>(token);
        const auto page = static_cast<size_t>(table_[s * static_cast<size_t>(stride_) +
                                                     token / static_cast<size_t>(shape.page_size)]);
        const int32_t slot = place % shape.page_size;
        const std::span<float> row(rows.data() + token * dim_count, dim_count);
        store_row(row, slot, pages.data() + page * page_bytes);
        std::ranges::copy(
            row, host_pages_.begin() +
                     static_cast<ptrdiff_t>(
                         (page * static_cast<size_t>(shape.page_size) + static_cast<size_t>(slot)) *
                         dim_count));
      }
    }
    pages_ = std::make_unique<DeviceArray<uint8_t>>(pages.size());
    EXPECT_TRUE(copy_to_device(pages_->data(), pages.data(), pages_->bytes()).ok());
  }

  /// Stores a row of bf16 numbers in a page; of coded rows the latent becomes what codes make. Rows
  /// of different tokens have scales of different size, and some are zeros.
  void store_row(std::span<float> row, int32_t slot, uint8_t* page) {
    const auto put = [&](int32_t dim, const auto& value) {
      std::memcpy(page + latent_offset(shape, slot, dim), &value, sizeof(value));
    };
    const int32_t rank = shape.coded() ? shape.rank() : 0;
    for (int32_t d = rank; d < shape.row_dim; ++d) {
      put(d, f32_to_bf16(row[static_cast<size_t>(d)]));
    }
    if (!shape.coded()) {
      return;
    }
    constexpr float kSizes[] = {1.0F, 3.0F, 0.05F, 0.0F, 0.7F};
    const float size = kSizes[rows_stored_++ % std::size(kSizes)];
    const float top = shape.code == KvCode::kInt8 ? 127.0F : 448.0F;
    const float scale = size / top;
    for (int32_t d = 0; d < rank; ++d) {
      float& number = row[static_cast<size_t>(d)];
      if (shape.code == KvCode::kInt8) {
        const auto code = static_cast<int8_t>(std::lround(number * top * (size > 0.0F ? 1 : 0)));
        put(d, code);
        number = static_cast<float>(code) * scale;
      } else {
        const uint8_t code = size > 0.0F ? encode_e4m3(number * top) : uint8_t{0};
        put(d, code);
        number = decode_e4m3(code) * scale;
      }
    }
    std::memcpy(page + latent_scale_offset(shape, slot), &scale, sizeof(scale));
  }

  void make_step() {
    std::vector<int32_t> begin{0};
    std::vector<int32_t> length;
    std::vector<int32_t> position;
    std::vector<int32_t> owner;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      for (int32_t i = 0; i < sequences_[s].q_len; ++i) {
        position.push_back(sequences_[s].kv_len - sequences_[s].q_len + i);
        owner.push_back(static_cast<int32_t>(s));
      }
      begin.push_back(static_cast<int32_t>(position.size()));
      length.push_back(sequences_[s].kv_len);
    }
    for (int32_t i = 0; i < kPadding; ++i) {
      begin.push_back(begin.back());
      length.push_back(0);
      position.push_back(0);
      owner.push_back(-1);
    }
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
             .rows = static_cast<int32_t>(position.size())};
  }

  [[nodiscard]] std::vector<float> expected() const {
    std::vector<SequenceSpan> spans;
    int32_t row = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      spans.push_back({.q_begin = row,
                       .q_len = sequences_[s].q_len,
                       .kv_len = sequences_[s].kv_len,
                       .pages = table_.data() + s * static_cast<size_t>(stride_)});
      row += sequences_[s].q_len;
    }
    auto* const bytes = const_cast<float*>(host_pages_.data());
    const KvView kv{.code = KvCode::kF32,
                    .page_size = shape.page_size,
                    .kv_heads = 1,
                    .head_dim = shape.row_dim,
                    .pages = reinterpret_cast<std::byte*>(bytes),
                    .latent_rank = std::min(shape.row_dim, kFastValues)};
    std::vector<float> out(static_cast<size_t>(row) * width());
    reference_attention({.q = queries.data(),
                         .q_stride = static_cast<int64_t>(width()),
                         .out = out.data(),
                         .out_stride = static_cast<int64_t>(width()),
                         .heads = shape.heads,
                         .scale = shape.scale,
                         .kv = kv,
                         .sequences = spans});
    return out;
  }

  std::vector<TestSequence> sequences_;
  int32_t stride_ = 0;  // pages of a sequence in the table
  std::vector<int32_t> table_;
  std::vector<float> host_pages_;
  size_t rows_stored_ = 0;
  StepMetadata step_;
  std::unique_ptr<DeviceArray<int32_t>> q_begin_, kv_len_, position_, owner_, device_table_;
  std::unique_ptr<DeviceArray<uint16_t>> device_queries_, out_;
  std::unique_ptr<DeviceArray<uint8_t>> pages_, plan_, workspace_;
};

LatentShape shape_of(int32_t heads, int32_t row_dim = kFastDim, int32_t page_size = 64) {
  return {.code = KvCode::kBf16,
          .page_size = page_size,
          .row_dim = row_dim,
          .heads = heads,
          .scale = 1.0F / std::sqrt(static_cast<float>(row_dim))};
}

void check_case(const LatentShape& shape, const std::vector<TestSequence>& sequences) {
  SCOPED_TRACE(fmt::format("{} heads, rows of {} in {}, pages of {}", shape.heads, shape.row_dim,
                           kv_code_name(shape.code), shape.page_size));
  LatentCase test(shape, sequences);
  const std::vector<uint16_t> first = test.run(false);
  test.check(first);
  if (!testing::brief_tests()) {
    EXPECT_EQ(first, test.run(true)) << "two runs differ";
  }
}

LatentShape coded_shape(KvCode code,
                        int32_t heads,
                        int32_t rank = kFastValues,
                        int32_t page_size = 64) {
  const int32_t rope_dim = rank == kFastValues ? kFastDim - kFastValues : 8;
  LatentShape shape = shape_of(heads, rank + rope_dim, page_size);
  shape.code = code;
  shape.rope_dim = rope_dim;
  return shape;
}

std::vector<TestSequence> decode_lengths() {
  return {{1, 1}, {1, 3}, {1, 17}, {1, 63}, {1, 64}, {1, 65}, {1, 257}, {1, 700}};
}

TEST(Latent, DecodesForAnyNumberOfHeads) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {1, 5, 8, 12, 16, 20, 32, 40, 64, 96, 128}) {
    check_case(shape_of(heads), decode_lengths());
  }
}

TEST(Latent, PageSizes) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t page : {16, 32, 48, 128}) {
    for (const int32_t heads : {8, 64}) {
      check_case(shape_of(heads, kFastDim, page), decode_lengths());
    }
  }
}

TEST(Latent, LongSequencesAreCutAndManyShareBlocks) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {3, 16, 33}) {
    check_case(shape_of(heads), {{1, 9001}});
    check_case(shape_of(heads), {{1, 4001}, {1, 5}, {1, 900}});
    std::vector<TestSequence> many;
    for (int32_t i = 0; i < 150; ++i) {
      many.push_back({1, 1 + i * 37 % 300});
    }
    check_case(shape_of(heads), many);
  }
}

TEST(Latent, FewRowsOfSequencesAreSharedAndManyAreNot) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {8, 16, 20, 64}) {
    check_case(shape_of(heads), {{3, 130}, {1, 64}, {2, 2}, {4, 700}, {1, 300}});
    check_case(shape_of(heads), {{17, 200}, {1, 64}, {2, 66}});
  }
  check_case(shape_of(5), {{131, 140}, {37, 200}});
}

TEST(Latent, RowsInEightBits) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kInt8, KvCode::kFp8}) {
    for (const int32_t heads : {1, 5, 8, 12, 16, 20, 64, 96, 128}) {
      check_case(coded_shape(code, heads), decode_lengths());
    }
    for (const int32_t page : {16, 48, 128}) {
      check_case(coded_shape(code, 16, kFastValues, page), decode_lengths());
      check_case(coded_shape(code, 64, kFastValues, page), decode_lengths());
    }
  }
}

TEST(Latent, RowsInEightBitsOfManyTokensAndQueries) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kInt8, KvCode::kFp8}) {
    for (const int32_t heads : {3, 16, 33, 64}) {
      check_case(coded_shape(code, heads), {{1, 9001}});
      check_case(coded_shape(code, heads), {{3, 130}, {1, 64}, {2, 2}, {4, 700}, {1, 300}});
      check_case(coded_shape(code, heads), {{17, 200}, {1, 64}, {2, 66}});
      std::vector<TestSequence> many;
      for (int32_t i = 0; i < 150; ++i) {
        many.push_back({1, 1 + i * 37 % 300});
      }
      check_case(coded_shape(code, heads), many);
    }
    check_case(coded_shape(code, 5), {{131, 140}, {37, 200}});
    check_case(coded_shape(code, 3, 32), decode_lengths());  // by the kernel for any shape
    check_case(coded_shape(code, 4, 136, 16), {{5, 40}, {1, 130}});
  }
}

TEST(Latent, OtherDimensions) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t dim : {16, 40, 96, 136, 1024}) {
    check_case(shape_of(3, dim), decode_lengths());
    check_case(shape_of(4, dim, 16), {{5, 40}, {1, 130}});
  }
}

TEST(Latent, ACapturedStepServesOtherLengths) {
  NIBBLE_NEEDS_GPU();
  for (const LatentShape& shape : {shape_of(16), shape_of(64), coded_shape(KvCode::kInt8, 16),
                                   coded_shape(KvCode::kFp8, 64)}) {
    LatentCase test(shape, {{1, 3000}, {1, 700}, {1, 64}});
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    test.launch(stream, true);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (const std::vector<int32_t>& lengths :
         {std::vector<int32_t>{3000, 700, 64}, {1, 65, 2}, {33, 699, 63}}) {
      test.change_lengths(lengths);
      ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      test.check(test.output());
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

/// Appends the rows of two sequences, and rotates queries, beside the references.
void check_rows(int32_t row_dim, int32_t rope_dim, int32_t q_rank, bool interleaved) {
  SCOPED_TRACE(fmt::format("rows of {}, {} rotated, queries of {}", row_dim, rope_dim, q_rank));
  LatentCase test(shape_of(2, row_dim, 16), {{3, 35}, {1, 17}});
  const int32_t rows = test.step().rows;
  const int64_t stride = q_rank + row_dim + 8;
  std::vector<float> inv_freq;
  for (int32_t i = 0; i < rope_dim / 2; ++i) {
    inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / rope_dim)));
  }
  const std::vector<float> q_norm = random_values(static_cast<size_t>(q_rank), 5, 1.0F);
  const std::vector<float> norm = random_values(static_cast<size_t>(row_dim - rope_dim), 6, 1.0F);
  std::vector<float> host = bf16_values(static_cast<size_t>(rows * stride), 7);
  const DeviceArray<float> device_freq(inv_freq);
  const DeviceArray<float> device_q_norm(q_norm);
  const DeviceArray<float> device_norm(norm);
  const DeviceArray<uint16_t> device(bf16_bits(host));
  const LatentTurn turn{
      .inv_freq = device_freq.data(), .dim = rope_dim, .factor = 1.25F, .interleaved = interleaved};
  ASSERT_EQ(append_latent({.shape = test.shape,
                           .step = test.step(),
                           .pages = test.pages().data(),
                           .rows = device.data(),
                           .stride = stride,
                           .q_rank = q_rank,
                           .q_norm = device_q_norm.data(),
                           .latent_norm = device_norm.data(),
                           .norm_eps = 1e-6F,
                           .turn = turn},
                          {nullptr, false}),
            cudaSuccess);
  const int32_t pages[] = {0, 1, 2, 3, 4, 5};
  const std::vector<SequenceSpan> spans = {
      {.q_begin = 0, .q_len = 3, .kv_len = 35, .pages = pages},
      {.q_begin = 3, .q_len = 1, .kv_len = 17, .pages = pages + 3}};
  std::vector<float> cache(static_cast<size_t>(6 * 16 * row_dim));
  const KvView kv{.code = KvCode::kF32,
                  .page_size = 16,
                  .kv_heads = 1,
                  .head_dim = row_dim,
                  .pages = reinterpret_cast<std::byte*>(cache.data()),
                  .latent_rank = row_dim - rope_dim};
  const LatentRope rope{.inv_freq = inv_freq.data(),
                        .dim = rope_dim,
                        .attention_factor = 1.25F,
                        .interleaved = interleaved};
  std::vector<float> want = host;
  reference_latent_append({.rows = want.data(),
                           .stride = stride,
                           .q_rank = q_rank,
                           .q_norm = q_norm.data(),
                           .latent_norm = norm.data(),
                           .norm_eps = 1e-6F,
                           .rope = rope,
                           .kv = kv,
                           .sequences = spans});
  const std::vector<uint16_t> got = device.host();
  for (size_t i = 0; i < static_cast<size_t>(4 * stride); ++i) {
    const bool normed = static_cast<int64_t>(i) % stride < q_rank;
    const double tolerance = normed ? 0.005 * std::fabs(want[i]) + 1e-6 : 0.0;
    ASSERT_NEAR(bf16_to_f32(got[i]), want[i], tolerance) << "number " << i;
  }
  const std::vector<uint8_t> cached = test.pages().host();
  const int32_t positions[][2] = {{0, 32}, {0, 33}, {0, 34}, {1, 16}};  // of the step's rows
  for (const auto& [sequence, position] : positions) {
    const auto page = static_cast<size_t>(test.page(sequence, position / 16));
    for (int32_t d = 0; d < row_dim; ++d) {
      uint16_t bits = 0;
      std::memcpy(&bits,
                  cached.data() + page * static_cast<size_t>(latent_page_bytes(test.shape)) +
                      latent_offset(row_dim, position % 16, d),
                  2);
      const float value = cache[static_cast<size_t>((sequence * 3 * 16 + position) * row_dim + d)];
      ASSERT_NEAR(bf16_to_f32(bits), value, 0.005 * std::fabs(value) + 0.004)
          << "position " << position << ", number " << d;
    }
  }
}

TEST(Latent, RowsAreNormedRotatedAndAppended) {
  NIBBLE_NEEDS_GPU();
  check_rows(576, 64, 1536, true);
  check_rows(576, 64, 48, false);
  check_rows(96, 32, 8, true);
  check_rows(40, 8, 4096, false);
}

/// A row of numbers, some of them not finite, appended in 8 bits and taken apart again.
void check_coded_rows(KvCode code, int32_t rank) {
  SCOPED_TRACE(fmt::format("{} numbers in {}", rank, kv_code_name(code)));
  LatentCase test(coded_shape(code, 2, rank, 16), {{3, 35}, {1, 17}});
  const int32_t dim = test.shape.row_dim;
  const std::vector<float> norm(static_cast<size_t>(rank), 1.0F);
  const std::vector<float> inv_freq(static_cast<size_t>(test.shape.rope_dim / 2), 0.0F);
  std::vector<float> rows = bf16_values(static_cast<size_t>(4 * dim), 7);
  std::fill_n(rows.begin() + dim, rank, 0.0F);  // the second row is zeros
  rows[static_cast<size_t>(3 * dim + 5)] = INFINITY;
  const DeviceArray<float> device_norm(norm);
  const DeviceArray<float> device_freq(inv_freq);
  const DeviceArray<uint16_t> device(bf16_bits(rows));
  ASSERT_EQ(append_latent({.shape = test.shape,
                           .step = test.step(),
                           .pages = test.pages().data(),
                           .rows = device.data(),
                           .stride = dim,
                           .latent_norm = device_norm.data(),
                           .norm_eps = 1e-6F,
                           .turn = {.inv_freq = device_freq.data(), .dim = test.shape.rope_dim}},
                          {nullptr, false}),
            cudaSuccess);
  const std::vector<uint8_t> cached = test.pages().host();
  const int32_t positions[][2] = {{0, 32}, {0, 33}, {0, 34}, {1, 16}};  // of the step's rows
  for (size_t row = 0; row < 4; ++row) {
    const auto [sequence, position] = positions[row];
    const uint8_t* const page =
        cached.data() + static_cast<size_t>(test.page(sequence, position / 16)) *
                            static_cast<size_t>(latent_page_bytes(test.shape));
    float scale = 0.0F;
    std::memcpy(&scale, page + latent_scale_offset(test.shape, position % 16), sizeof(scale));
    if (row == 3) {
      EXPECT_TRUE(std::isnan(scale));
      continue;
    }
    double squares = 0.0;
    for (int32_t d = 0; d < rank; ++d) {
      const double number = rows[row * static_cast<size_t>(dim) + static_cast<size_t>(d)];
      squares += number * number / rank;
    }
    const double factor = 1.0 / std::sqrt(squares + 1e-6);
    for (int32_t d = 0; d < rank; ++d) {
      const double want = rows[row * static_cast<size_t>(dim) + static_cast<size_t>(d)] * factor;
      const uint8_t bits = page[latent_offset(test.shape, position % 16, d)];
      const double got =
          scale * (code == KvCode::kInt8 ? static_cast<int8_t>(bits) : decode_e4m3(bits));
      const double step = code == KvCode::kInt8 ? 0.51 * scale : 0.064 * std::fabs(want) + scale;
      ASSERT_NEAR(got, want, step + 1e-6) << "row " << row << ", number " << d;
    }
  }
}

TEST(Latent, RowsAreAppendedInEightBits) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kInt8, KvCode::kFp8}) {
    check_coded_rows(code, kFastValues);
    check_coded_rows(code, 32);
    check_coded_rows(code, 1016);
  }
}

TEST(Latent, QueriesAreRotated) {
  NIBBLE_NEEDS_GPU();
  for (const bool interleaved : {true, false}) {
    for (const int32_t heads : {1, 3, 128}) {
      LatentCase test(shape_of(heads, 576, 16), {{3, 35}, {1, 17}});
      const int64_t stride = heads * 192 + 16;
      const std::vector<float> q = bf16_values(static_cast<size_t>(6 * stride), 9);
      const DeviceArray<uint16_t> device(bf16_bits(q));
      const DeviceArray<uint16_t> out(static_cast<size_t>(6 * heads * 576));
      std::vector<float> inv_freq;
      for (int32_t i = 0; i < 32; ++i) {
        inv_freq.push_back(static_cast<float>(std::pow(10000.0, -i / 32.0)));
      }
      const DeviceArray<float> device_freq(inv_freq);
      ASSERT_EQ(
          rotate_latent_queries(
              {.step = test.step(),
               .q = device.data(),
               .q_stride = stride,
               .heads = heads,
               .head_dim = 192,
               .turn = {.inv_freq = device_freq.data(), .dim = 64, .interleaved = interleaved},
               .out = out.data(),
               .out_dim = 576},
              {nullptr, false}),
          cudaSuccess);
      const std::vector<SequenceSpan> spans = {{.q_begin = 0, .q_len = 3, .kv_len = 35},
                                               {.q_begin = 3, .q_len = 1, .kv_len = 17}};
      std::vector<float> want(static_cast<size_t>(6 * heads * 576), NAN);
      reference_latent_queries(
          {.q = q.data(),
           .q_stride = stride,
           .heads = heads,
           .head_dim = 192,
           .rope = {.inv_freq = inv_freq.data(), .dim = 64, .interleaved = interleaved},
           .out = want.data(),
           .out_dim = 576,
           .sequences = spans});
      const std::vector<uint16_t> got = out.host();
      for (size_t i = 0; i < want.size(); ++i) {  // what lies beside stays as it was
        ASSERT_EQ(std::isnan(want[i]), std::isnan(bf16_to_f32(got[i]))) << i;
        if (!std::isnan(want[i])) {
          ASSERT_NEAR(bf16_to_f32(got[i]), want[i], 0.005 * std::fabs(want[i]) + 1e-3) << i;
        }
      }
    }
  }
}

TEST(Latent, RefusesWhatHasNoKernel) {
  NIBBLE_NEEDS_GPU();
  EXPECT_TRUE(check_latent(shape_of(64)).ok());
  EXPECT_TRUE(check_latent(shape_of(7, 96, 16)).ok());
  EXPECT_FALSE(check_latent(shape_of(64, 1032)).ok());
  EXPECT_FALSE(check_latent(shape_of(64, 20)).ok());
  EXPECT_FALSE(check_latent(shape_of(64, 576, 24)).ok());
  EXPECT_FALSE(check_latent(shape_of(2048)).ok());
  EXPECT_TRUE(check_latent(coded_shape(KvCode::kInt8, 64)).ok());
  EXPECT_FALSE(check_latent({.code = KvCode::kInt8, .row_dim = 576, .heads = 8}).ok());
}

}  // namespace
}  // namespace nibble::cuda
