#include "backend/cuda/testing/attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/f16.h"
#include "base/math.h"

namespace nibble::cuda::testing {
namespace {

double f8_value(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

AttentionCase::AttentionCase(const AttentionShape& the_shape,
                             std::vector<CaseSequence> the_sequences,
                             uint32_t seed)
    : shape(the_shape), sequences(std::move(the_sequences)), basis(basis_of(shape.kv.code)) {
  std::mt19937 random(seed);
  const KvLayout& kv = shape.kv;
  int32_t longest = 1;
  for (const CaseSequence& sequence : sequences) {
    longest = std::max(longest, sequence.kv_len);
  }
  pages_per_sequence_ = round_up(longest, kv.page_size) / kv.page_size;
  stride_ = pages_per_sequence_ + 3;
  const auto count = static_cast<int32_t>(sequences.size());
  std::vector<int32_t> order(static_cast<size_t>(count * pages_per_sequence_));
  std::iota(order.begin(), order.end(), 1);
  std::shuffle(order.begin(), order.end(), random);
  host_table_.assign(static_cast<size_t>(stride_ * count), -1);
  for (int32_t s = 0; s < count; ++s) {
    std::copy_n(order.begin() + s * pages_per_sequence_, pages_per_sequence_,
                host_table_.begin() + s * stride_);
  }
  page_table_ = std::make_unique<DeviceArray<int32_t>>(host_table_);
  pages_ = std::make_unique<DeviceArray<uint8_t>>(static_cast<size_t>(page_bytes(kv)) *
                                                  (order.size() + 1));
  const auto last = static_cast<int32_t>(order.size());
  host_residual_table_ = host_table_;
  for (int32_t& page : host_residual_table_) {
    page = page < 0 ? page : last - page;
  }
  residual_table_ = std::make_unique<DeviceArray<int32_t>>(host_residual_table_);
  residual_ = std::make_unique<DeviceArray<uint16_t>>(
      kv_has_residual(kv.code)
          ? static_cast<size_t>(int64_t{last} * kv.kv_heads * kv.page_size * kv.head_dim)
          : 0);

  std::vector<CaseSequence> all = sequences;
  for (CaseSequence& sequence : all) {
    sequence.q_len = sequence.kv_len;
  }
  all_ = upload(all, 0);
  step_ = upload(sequences, 2);
  const int64_t width = int64_t{shape.heads + 2 * kv.kv_heads} * kv.head_dim;
  std::normal_distribution<float> normal;
  qkv.resize(static_cast<size_t>(width * all_.rows));
  std::vector<uint16_t> bits(qkv.size());
  for (size_t i = 0; i < qkv.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % width / kv.head_dim;
    const bool key = column >= shape.heads && column < shape.heads + kv.kv_heads;
    bits[i] = f32_to_bf16(normal(random) * (key ? 2.0F : 1.0F) + (key ? 0.3F : 0.1F));
    qkv[i] = bf16_to_f32(bits[i]);
  }
  device_qkv = std::make_unique<DeviceArray<uint16_t>>(bits);
  std::vector<float> frequencies(static_cast<size_t>(kv.head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = static_cast<float>(
        std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(frequencies.size())));
  }
  inv_freq = std::make_unique<DeviceArray<float>>(frequencies);
  if (kv_format(kv.code).per == KvParameters::kPerChannel) {
    std::uniform_real_distribution<float> uniform(0.25F, 0.45F);
    steps.resize(static_cast<size_t>(kv.kv_heads * kv.head_dim));
    std::ranges::generate(steps, [&] { return uniform(random); });
    device_steps_ = std::make_unique<DeviceArray<float>>(steps);
    basis.key_step = basis.value_step = device_steps_->data();
  }
  const auto out_size = static_cast<size_t>(step_.rows * shape.heads * kv.head_dim);
  out = std::make_unique<DeviceArray<uint16_t>>(out_size);
  plan_ = std::make_unique<DeviceArray<uint8_t>>(
      attention_plan_bytes(shape, step_.sequences, step_.rows));
  workspace_ = std::make_unique<DeviceArray<uint8_t>>(attention_workspace_bytes(shape));
  workspace_->zero();
}

AttentionCase::Arrays AttentionCase::upload(const std::vector<CaseSequence>& sequences,
                                            int32_t padding) {
  std::vector<int32_t> begin{0};
  std::vector<int32_t> length;
  std::vector<int32_t> prompt;
  std::vector<int32_t> position;
  std::vector<int32_t> owner;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int32_t i = 0; i < sequences[s].q_len; ++i) {
      position.push_back(sequences[s].kv_len - sequences[s].q_len + i);
      owner.push_back(static_cast<int32_t>(s));
    }
    begin.push_back(static_cast<int32_t>(position.size()));
    length.push_back(sequences[s].kv_len);
    prompt.push_back(sequences[s].prompt_len);
  }
  for (int32_t i = 0; i < padding; ++i) {
    begin.push_back(begin.back());
    length.push_back(0);
    prompt.push_back(0);
    position.push_back(0);
    owner.push_back(-1);
  }
  Arrays arrays;
  arrays.sequences = static_cast<int32_t>(length.size());
  arrays.rows = static_cast<int32_t>(position.size());
  arrays.q_begin = std::make_unique<DeviceArray<int32_t>>(begin);
  arrays.kv_len = std::make_unique<DeviceArray<int32_t>>(length);
  arrays.prompt_len = std::make_unique<DeviceArray<int32_t>>(prompt);
  arrays.position = std::make_unique<DeviceArray<int32_t>>(position);
  arrays.sequence = std::make_unique<DeviceArray<int32_t>>(owner);
  return arrays;
}

StepMetadata AttentionCase::Arrays::view(const std::unique_ptr<DeviceArray<int32_t>>& table,
                                         int64_t stride) const {
  StepMetadata step;
  step.q_begin = q_begin->data();
  step.kv_len = kv_len->data();
  step.prompt_len = prompt_len->data();
  step.page_table = table->data();
  step.page_table_stride = stride;
  step.row_position = position->data();
  step.row_sequence = sequence->data();
  step.sequences = sequences;
  step.rows = rows;
  return step;
}

void AttentionCase::change_lengths(std::vector<CaseSequence> changed) {
  sequences = std::move(changed);
  const Arrays arrays = upload(sequences, 2);
  const auto copy = [](DeviceArray<int32_t>& to, const DeviceArray<int32_t>& from) {
    ASSERT_EQ(to.size(), from.size());
    EXPECT_EQ(cudaMemcpy(to.data(), from.data(), to.bytes(), cudaMemcpyDeviceToDevice),
              cudaSuccess);
  };
  copy(*step_.q_begin, *arrays.q_begin);
  copy(*step_.kv_len, *arrays.kv_len);
  copy(*step_.prompt_len, *arrays.prompt_len);
  copy(*step_.position, *arrays.position);
  copy(*step_.sequence, *arrays.sequence);
  spoil_unread_pages();
  spoil_unread_residual();
}

RopeAppendLaunch AttentionCase::append_launch(const StepMetadata& step, uint16_t* rows) {
  RopeAppendLaunch append;
  append.shape = shape;
  append.step = step;
  append.pages = pages_->data();
  append.residual = {residual_->data(), residual_table_->data()};
  append.qkv = rows;
  append.qkv_stride = int64_t{shape.heads + 2 * shape.kv.kv_heads} * shape.kv.head_dim;
  append.inv_freq = inv_freq->data();
  append.q_norm = q_norm;
  append.k_norm = k_norm;
  append.basis = basis;
  append.far_outside = far_outside;
  if (dynamic.original > 0) {
    const int32_t pairs = shape.kv.head_dim / 2;
    frequencies_ = std::make_unique<DeviceArray<float>>(static_cast<size_t>(step.rows * pairs));
    EXPECT_EQ(row_frequencies({.step = step,
                               .dynamic = dynamic,
                               .inv_freq = inv_freq->data(),
                               .head_dim = shape.kv.head_dim,
                               .out = frequencies_->data()},
                              {nullptr, false}),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    append.inv_freq = frequencies_->data();
    append.inv_freq_stride = pairs;
  }
  return append;
}

void AttentionCase::fill_cache() {
  const RopeAppendLaunch append = append_launch(all_tokens(), device_qkv->data());
  ASSERT_EQ(rope_append(append, {nullptr, false}), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint16_t> rotated = device_qkv->host();
  const int64_t width = int64_t{shape.heads} * shape.kv.head_dim;
  std::vector<uint16_t> queries(static_cast<size_t>(width * step_.rows), 0);
  int64_t from = 0;
  int64_t to = 0;
  for (const CaseSequence& sequence : sequences) {
    from += sequence.kv_len - sequence.q_len;
    for (int32_t i = 0; i < sequence.q_len; ++i, ++from, ++to) {
      std::copy_n(rotated.begin() + from * append.qkv_stride, width, queries.begin() + to * width);
    }
  }
  q = std::make_unique<DeviceArray<uint16_t>>(queries);
  read_cache();
  spoil_unread_pages();
  spoil_unread_residual();
}

void AttentionCase::append_in_steps(const std::vector<int32_t>& counts) {
  int32_t done = 0;
  for (const int32_t count : counts) {
    const Arrays arrays = upload({{.q_len = count, .kv_len = done + count}}, 1);
    const StepMetadata step = arrays.view(page_table_, stride_);
    const int64_t width = int64_t{shape.heads + 2 * shape.kv.kv_heads} * shape.kv.head_dim;
    const RopeAppendLaunch append = append_launch(step, device_qkv->data() + done * width);
    ASSERT_EQ(rope_append(append, {nullptr, true}), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    done += count;
  }
  read_cache();
}

// Keys as they are of groups in front of the step's rows, whose pages are others' by then.
void AttentionCase::spoil_unread_residual() {
  if (!kv_has_residual(shape.kv.code)) {
    return;
  }
  std::vector<uint16_t> residual(host_residual_.size(), 0xffff);
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int32_t first = sequences[s].kv_len - sequences[s].q_len;
    for (auto token = static_cast<int32_t>(first / kChannelTokens * kChannelTokens);
         token < sequences[s].kv_len; ++token) {
      for (int32_t i = 0; i < shape.kv.kv_heads * shape.kv.head_dim; ++i) {
        const size_t at = residual_place(static_cast<int32_t>(s), token, i / shape.kv.head_dim,
                                         i % shape.kv.head_dim);
        residual[at] = host_residual_[at];
      }
    }
  }
  ASSERT_TRUE(copy_to_device(residual_->data(), residual.data(), residual_->bytes()).ok());
}

// Pages that the window has left behind are others' in a server.
void AttentionCase::spoil_unread_pages() {
  if (shape.sliding_window == 0 || host_pages_.empty()) {
    return;
  }
  std::vector<uint8_t> pages = host_pages_;
  const int64_t bytes = page_bytes(shape.kv);
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int32_t first = sequences[s].kv_len - sequences[s].q_len;
    const int64_t unread = first_token_read(shape.sliding_window, first) / shape.kv.page_size;
    for (int64_t i = 0; i < unread; ++i) {
      const int32_t page = host_table_[s * static_cast<size_t>(stride_) + static_cast<size_t>(i)];
      std::fill_n(pages.begin() + page * bytes, bytes, uint8_t{0xff});
    }
  }
  ASSERT_TRUE(copy_to_device(pages_->data(), pages.data(), pages.size()).ok());
}

void AttentionCase::set_number(size_t index, float value) {
  const uint16_t bits = f32_to_bf16(value);
  qkv[index] = bf16_to_f32(bits);
  ASSERT_TRUE(copy_to_device(device_qkv->data() + index, &bits, sizeof(bits)).ok());
}

void AttentionCase::add_sinks() {
  constexpr float kSinks[] = {0.5F, -200.0F, 4.0F, -3.0F, 9.0F, 2.0F, 60.0F};
  for (int32_t head = 0; head < shape.heads; ++head) {
    sinks.push_back(kSinks[static_cast<size_t>(head) % std::size(kSinks)]);
  }
  device_sinks = std::make_unique<DeviceArray<float>>(sinks);
}

AttentionLaunch AttentionCase::attention_launch() const {
  AttentionLaunch launch;
  launch.shape = shape;
  launch.step = step();
  launch.plan = plan_->data();
  launch.pages = pages_->data();
  launch.residual = {residual_->data(), residual_table_->data()};
  launch.q = q->data();
  launch.q_stride = int64_t{shape.heads} * shape.kv.head_dim;
  launch.out = out->data();
  launch.out_stride = launch.q_stride;
  launch.workspace = workspace_->data();
  launch.sinks = device_sinks != nullptr ? device_sinks->data() : nullptr;
  return launch;
}

void AttentionCase::run_appending(const LaunchContext& context) {
  const KvLayout& kv = shape.kv;
  const auto width = static_cast<size_t>((shape.heads + 2 * kv.kv_heads) * kv.head_dim);
  std::vector<uint8_t> pages = host_pages_;
  std::vector<uint16_t> rows(width * static_cast<size_t>(step_.rows), 0xffff);
  size_t from = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int32_t last = sequences[s].kv_len - 1;
    from += static_cast<size_t>(last) * width;
    for (size_t i = 0; i < width; ++i, ++from) {
      rows[s * width + i] = f32_to_bf16(qkv[from]);
    }
    const auto row_bytes = static_cast<int32_t>(kv_row_bytes(kv.code, kv.head_dim));
    for (int32_t i = 0; i < 2 * kv.kv_heads * row_bytes; ++i) {
      const CachePlace at = place(static_cast<int32_t>(s), last, i / row_bytes / 2,
                                  i / row_bytes % 2 == 1, i % row_bytes);
      pages[at.row] = 0xff;
      std::memset(pages.data() + at.parameters, 0xff,
                  static_cast<size_t>(2 * kv_parameters(kv.code)));
    }
  }
  const DeviceArray<uint16_t> device_rows(rows);
  const auto upload_pages = [&] {
    ASSERT_TRUE(copy_to_device(pages_->data(), pages.data(), pages.size()).ok());
  };
  upload_pages();
  AttentionLaunch launch = attention_launch();
  launch.q = nullptr;
  const RopeAppendLaunch append =
      append_launch(launch.step, const_cast<uint16_t*>(device_rows.data()));
  EXPECT_EQ(append_decode_attention(append, launch, context), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(pages_->host() == host_pages_) << "the cache differs";
}

void AttentionCase::launch_all(const LaunchContext& context) {
  const AttentionLaunch launch = attention_launch();
  EXPECT_EQ(plan_attention(shape, launch.step, plan_->data(), {context.stream, false}),
            cudaSuccess);
  EXPECT_EQ(decode_attention(launch, context), cudaSuccess);
  if (std::ranges::any_of(sequences, [](const CaseSequence& s) { return s.q_len > 1; })) {
    EXPECT_EQ(prefill_attention(launch, context), cudaSuccess);
  }
}

void AttentionCase::run(const LaunchContext& context) {
  launch_all(context);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

AttentionCase::CachePlace AttentionCase::place(
    int32_t sequence, int32_t token, int32_t head, bool value, int32_t byte) const {
  const KvLayout& kv = shape.kv;
  const int32_t tile_tokens = kv_tile_tokens(kv.code);
  const int32_t page = host_table_[static_cast<size_t>(sequence * stride_ + token / kv.page_size)];
  const int32_t slot = token % kv.page_size;
  const int64_t tile =
      page * page_bytes(kv) + int64_t{head * (kv.page_size / tile_tokens) + slot / tile_tokens} *
                                  kv_tile_bytes(kv.code, kv.head_dim);
  const int32_t inside = slot % tile_tokens;
  const int64_t rows = tile + (value ? kv_tile_rows_bytes(kv.code, kv.head_dim) : 0);
  const auto row_bytes = static_cast<int32_t>(kv_row_bytes(kv.code, kv.head_dim));
  int64_t parameters = tile + 2 * kv_tile_rows_bytes(kv.code, kv.head_dim);
  if (value || !kv_has_residual(kv.code)) {
    parameters += (value ? kv_key_parameter_bytes(kv.code, kv.head_dim) : 0) +
                  2 * kv_parameters(kv.code) * kv_parameter_index(kv.code, inside);
  }
  return {.row = static_cast<size_t>(rows + kv_row_offset(row_bytes, inside, byte)),
          .parameters = static_cast<size_t>(parameters)};
}

size_t AttentionCase::residual_place(int32_t sequence,
                                     int32_t token,
                                     int32_t head,
                                     int32_t d) const {
  const KvLayout& kv = shape.kv;
  const int64_t page =
      host_residual_table_[static_cast<size_t>(sequence * stride_ + token / kv.page_size)];
  return static_cast<size_t>((page * kv.kv_heads + head) * kv.page_size * kv.head_dim +
                             kv_residual_offset(kv.head_dim, token % kv.page_size, 2 * d) / 2);
}

double AttentionCase::residual_key(int32_t sequence, int32_t token, int32_t head, int32_t d) const {
  return bf16_to_f32(host_residual_[residual_place(sequence, token, head, d)]);
}

double AttentionCase::cached(
    int32_t sequence, int32_t token, int32_t head, bool value, int32_t d) const {
  const KvLayout& kv = shape.kv;
  const auto row_bytes = static_cast<int32_t>(kv_row_bytes(kv.code, kv.head_dim));
  const auto byte = static_cast<int32_t>(int64_t{d} * row_bytes / kv.head_dim);
  const CachePlace where = place(sequence, token, head, value, byte);
  const uint8_t* at = host_pages_.data() + where.row;
  const uint8_t* parameters = host_pages_.data() + where.parameters;
  uint16_t half[2] = {};
  std::memcpy(half, parameters, static_cast<size_t>(2 * kv_parameters(kv.code)));
  if (kv_has_residual(kv.code) && !value) {
    const uint8_t* const own = parameters + 2 * kv_channel_index(d);
    std::memcpy(&half[0], own, 2);
    std::memcpy(&half[1], own + 2 * kv.head_dim, 2);
  }
  switch (kv.code) {
    case KvCode::kInt4Page:
    case KvCode::kInt4:
      return ((*at >> (d % 2 * 4)) & 15) * static_cast<double>(f16_to_f32(half[0])) +
             f16_to_f32(half[1]);
    case KvCode::kInt4Static:
      return ((*at >> (d % 2 * 4)) & 15) - 8;
    case KvCode::kInt8:
      return (*at - 128) * static_cast<double>(f16_to_f32(half[0]));
    case KvCode::kFp8:
      return f8_value(*at) * (value ? shape.v_scale : shape.k_scale);
    default:
      std::memcpy(half, at, 2);
      return bf16_to_f32(half[0]);
  }
}

std::vector<double> AttentionCase::expected() const {
  const KvLayout& kv = shape.kv;
  const int64_t width = int64_t{shape.heads} * kv.head_dim;
  const std::vector<uint16_t> queries = q->host();
  std::vector<double> result;
  int64_t row = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    const int32_t q_len = sequences[s].q_len;
    const int32_t kv_len = sequences[s].kv_len;
    const auto size = static_cast<size_t>(int64_t{kv_len} * kv.kv_heads * kv.head_dim);
    std::vector<double> cache[2] = {std::vector<double>(size), std::vector<double>(size)};
    for (size_t i = 0; i < size; ++i) {
      const auto d = static_cast<int32_t>(i % static_cast<size_t>(kv.head_dim));
      const auto head_token = static_cast<int32_t>(i / static_cast<size_t>(kv.head_dim));
      for (const int which : {0, 1}) {
        cache[which][i] = cached(static_cast<int32_t>(s), head_token % kv_len, head_token / kv_len,
                                 which == 1, d);
      }
    }
    for (int32_t i = 0; i < q_len; ++i, ++row) {
      for (int32_t head = 0; head < shape.heads; ++head) {
        const int32_t kv_head = head / (shape.heads / kv.kv_heads);
        const int32_t last = kv_len - q_len + i;
        const int32_t first =
            shape.sliding_window > 0 ? std::max(0, last - shape.sliding_window + 1) : 0;
        std::vector<double> sum(static_cast<size_t>(kv.head_dim), 0.0);
        double total = 0.0;
        double top = -1e30;
        std::vector<double> scores;
        for (int32_t t = first; t <= last; ++t) {
          const double* key = cache[0].data() + int64_t{kv_head * kv_len + t} * kv.head_dim;
          const bool as_it_is =
              kv_has_residual(kv.code) && t / kChannelTokens == last / kChannelTokens;
          double dot = 0.0;
          for (int32_t d = 0; d < kv.head_dim; ++d) {
            const auto at = static_cast<size_t>(row * width + head * kv.head_dim + d);
            dot += bf16_to_f32(queries[at]) *
                   (as_it_is ? residual_key(static_cast<int32_t>(s), t, kv_head, d) : key[d]);
          }
          scores.push_back(dot * shape.scale);
          top = std::max(top, scores.back());
        }
        if (!sinks.empty()) {
          const double sink = sinks[static_cast<size_t>(head)];
          top = std::max(top, sink);
          total = std::exp(sink - top);
        }
        for (int32_t t = first; t <= last; ++t) {
          const double* values = cache[1].data() + int64_t{kv_head * kv_len + t} * kv.head_dim;
          const double weight = std::exp(scores[static_cast<size_t>(t - first)] - top);
          total += weight;
          for (int32_t d = 0; d < kv.head_dim; ++d) {
            sum[static_cast<size_t>(d)] += weight * values[d];
          }
        }
        for (const double value : sum) {
          result.push_back(value / total);
        }
      }
    }
  }
  return result;
}

void AttentionCase::check(double tolerance) const {
  const std::vector<double> want = expected();
  const std::vector<uint16_t> got = out->host();
  const auto dim = static_cast<size_t>(shape.kv.head_dim);
  double worst = 0.0;
  size_t worst_row = 0;
  for (size_t row = 0; row < want.size() / dim; ++row) {
    double error = 0.0;
    double norm = 0.0;
    for (size_t d = 0; d < dim; ++d) {
      const double difference = bf16_to_f32(got[row * dim + d]) - want[row * dim + d];
      error += difference * difference;
      norm += want[row * dim + d] * want[row * dim + d];
    }
    const double relative = std::sqrt(error / norm);
    if (!(relative <= worst)) {
      worst = relative;
      worst_row = row;
    }
  }
  ::testing::Test::RecordProperty("relative_error", std::to_string(worst));
  EXPECT_LE(worst, tolerance) << "row " << worst_row / static_cast<size_t>(shape.heads) << " head "
                              << worst_row % static_cast<size_t>(shape.heads);
  for (size_t i = want.size(); i < got.size(); ++i) {
    ASSERT_EQ(got[i], 0xffff) << "a padded row was written";
  }
}

}  // namespace nibble::cuda::testing
