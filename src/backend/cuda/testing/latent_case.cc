#include "backend/cuda/testing/latent_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/f16.h"
#include "ops/attention.h"
#include "quant/codec.h"

namespace nibble::cuda::testing {
namespace {

constexpr int32_t kPadding = 2;      // sequences and rows of a graph's bucket that are not there
constexpr double kTolerance = 6e-3;  // weights and results are rounded to bf16

}  // namespace

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

LatentCase::LatentCase(const LatentShape& shape, std::vector<LatentSequence> sequences)
    : shape(shape), sequences_(std::move(sequences)) {
  int32_t longest = 0;
  for (const LatentSequence& sequence : sequences_) {
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
  plan_ =
      std::make_unique<DeviceArray<uint8_t>>(latent_plan_bytes(shape, step_.sequences, step_.rows));
  workspace_ =
      std::make_unique<DeviceArray<uint8_t>>(latent_workspace_bytes(shape, step_.sequences) + 1);
}

size_t LatentCase::width() const {
  return static_cast<size_t>(shape.heads) * static_cast<size_t>(shape.row_dim);
}

int32_t LatentCase::page(int32_t sequence, int32_t index) const {
  return table_[static_cast<size_t>(sequence * stride_ + index)];
}

void LatentCase::change_lengths(const std::vector<int32_t>& lengths) {
  for (size_t s = 0; s < sequences_.size(); ++s) {
    sequences_[s].kv_len = lengths[s];
  }
  std::vector<int32_t> padded = lengths;
  padded.resize(padded.size() + kPadding, 0);
  ASSERT_TRUE(copy_to_device(kv_len_->data(), padded.data(), kv_len_->bytes()).ok());
}

void LatentCase::launch(cudaStream_t stream, bool overlap) {
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
  if (overlap) {  // not the plan, but the launch before
    ASSERT_EQ(decode_latent(args, {stream, true}), cudaSuccess);
  }
  if (std::ranges::any_of(sequences_, [](const LatentSequence& s) { return s.q_len > 1; })) {
    ASSERT_EQ(prefill_latent(args, {stream, overlap}), cudaSuccess);
  }
}

std::vector<uint16_t> LatentCase::run(bool overlap) {
  EXPECT_TRUE(fill_device(out_->data(), 0xff, out_->bytes()).ok());
  launch(nullptr, overlap);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return out_->host();
}

void LatentCase::check(const std::vector<uint16_t>& output) const {
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

void LatentCase::fill_pages(size_t count) {
  const auto page_bytes = static_cast<size_t>(latent_page_bytes(shape));
  const auto dim_count = static_cast<size_t>(shape.row_dim);
  std::vector<uint8_t> pages(count * page_bytes, 0xff);
  host_pages_.assign(count * static_cast<size_t>(shape.page_size) * dim_count, 0.0F);
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const auto length = static_cast<size_t>(sequences_[s].kv_len);
    std::vector<float> rows = bf16_values(length * dim_count, 100 + static_cast<uint32_t>(s));
    for (size_t token = 0; token < length; ++token) {
      const auto place = static_cast<int32_t>(token);
      const auto page = static_cast<size_t>(
          table_[s * static_cast<size_t>(stride_) + token / static_cast<size_t>(shape.page_size)]);
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

void LatentCase::store_row(std::span<float> row, int32_t slot, uint8_t* page) {
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
  if (shape.code == KvCode::kInt4) {
    return store_groups(row, size, slot, page);
  }
  const float top = shape.code == KvCode::kInt8 ? 127.0F : 448.0F;
  const float scale = size / top;
  for (int32_t d = 0; d < rank; ++d) {
    float& number = row[static_cast<size_t>(d)];
    const float x = size > 0.0F ? number * top : 0.0F;
    if (shape.code == KvCode::kInt8) {
      const auto code = static_cast<int8_t>(std::lround(x));
      put(d, code);
      number = static_cast<float>(code) * scale;
    } else {
      const uint8_t code = encode_e4m3(x);
      put(d, code);
      number = decode_e4m3(code) * scale;
    }
  }
  std::memcpy(page + latent_params_offset(shape, slot), &scale, sizeof(scale));
}

void LatentCase::store_groups(std::span<float> row, float size, int32_t slot, uint8_t* page) const {
  for (int32_t d = 0; d < shape.rank(); ++d) {
    const int32_t group = d / kLatentGroup;
    const uint16_t scale = f32_to_f16(size * static_cast<float>(1 + group) / 15.0F);
    const uint16_t offset = f32_to_f16(size * (static_cast<float>(group) - 1.5F));
    float& number = row[static_cast<size_t>(d)];
    const float place = std::clamp((number + 1.0F) * 7.5F, 0.0F, 15.0F);
    const auto code = static_cast<uint8_t>(std::lround(place));
    uint8_t& byte = page[latent_offset(shape, slot, d)];
    byte = static_cast<uint8_t>(d % 2 == 0 ? code : byte | code << 4);
    number = static_cast<float>(code) * f16_to_f32(scale) + f16_to_f32(offset);
    const uint16_t line[2] = {scale, offset};
    std::memcpy(page + latent_params_offset(shape, slot) + 4 * group, line, sizeof(line));
  }
}

void LatentCase::make_step() {
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

std::vector<float> LatentCase::expected() const {
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

LatentShape latent_shape(int32_t heads, int32_t row_dim, int32_t page_size) {
  return {.code = KvCode::kBf16,
          .page_size = page_size,
          .row_dim = row_dim,
          .heads = heads,
          .scale = 1.0F / std::sqrt(static_cast<float>(row_dim))};
}

void check_case(const LatentShape& shape, const std::vector<LatentSequence>& sequences) {
  SCOPED_TRACE(fmt::format("{} heads, rows of {} in {}, pages of {}", shape.heads, shape.row_dim,
                           kv_code_name(shape.code), shape.page_size));
  LatentCase test(shape, sequences);
  const std::vector<uint16_t> first = test.run(false);
  test.check(first);
  if (!brief_tests()) {
    EXPECT_EQ(first, test.run(true)) << "two runs differ";
  }
}

LatentShape coded_shape(KvCode code, int32_t heads, int32_t rank, int32_t page_size) {
  const int32_t rope_dim = rank == kFastValues ? kFastDim - kFastValues : 8;
  LatentShape shape = latent_shape(heads, rank + rope_dim, page_size);
  shape.code = code;
  shape.rope_dim = rope_dim;
  return shape;
}

std::vector<LatentSequence> decode_lengths() {
  return {{1, 1}, {1, 3}, {1, 17}, {1, 63}, {1, 64}, {1, 65}, {1, 257}, {1, 700}};
}

}  // namespace nibble::cuda::testing
