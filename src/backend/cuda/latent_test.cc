#include "backend/cuda/latent.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/latent_case.h"
#include "base/f16.h"
#include "ops/latent.h"

namespace nibble::cuda {
namespace {

using testing::bf16_bits;
using testing::bf16_values;
using testing::check_case;
using testing::coded_shape;
using testing::decode_lengths;
using testing::DeviceArray;
using testing::kFastDim;
using testing::latent_shape;
using testing::LatentCase;
using testing::LatentSequence;
using testing::random_values;

TEST(Latent, DecodesForAnyNumberOfHeads) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {1, 5, 8, 12, 16, 20, 32, 40, 64, 96, 128}) {
    check_case(latent_shape(heads), decode_lengths());
  }
}

TEST(Latent, PageSizes) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t page : {16, 32, 48, 128}) {
    for (const int32_t heads : {8, 64}) {
      check_case(latent_shape(heads, kFastDim, page), decode_lengths());
    }
  }
}

TEST(Latent, LongSequencesAreCutAndManyShareBlocks) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {3, 16, 33}) {
    check_case(latent_shape(heads), {{1, 9001}});
    check_case(latent_shape(heads), {{1, 4001}, {1, 5}, {1, 900}});
    std::vector<LatentSequence> many;
    for (int32_t i = 0; i < 150; ++i) {
      many.push_back({1, 1 + i * 37 % 300});
    }
    check_case(latent_shape(heads), many);
  }
}

TEST(Latent, FewRowsOfSequencesAreSharedAndManyAreNot) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {8, 16, 20, 64}) {
    check_case(latent_shape(heads), {{3, 130}, {1, 64}, {2, 2}, {4, 700}, {1, 300}});
    check_case(latent_shape(heads), {{17, 200}, {1, 64}, {2, 66}});
  }
  check_case(latent_shape(5), {{131, 140}, {37, 200}});
}

TEST(Latent, ProductsOfWarps) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t heads : {1, 5, 16, 20, 64, 128}) {
    LatentShape shape = latent_shape(heads);
    shape.kernels = LatentKernels::kOfWarps;
    check_case(shape, decode_lengths());
    check_case(shape, {{3, 130}, {1, 64}, {2, 2}, {4, 700}, {1, 3000}});
    check_case(shape, {{17, 200}, {1, 64}, {131, 140}});
    shape.page_size = 16;
    check_case(shape, {{1, 33}, {5, 47}});
  }
}

TEST(Latent, OtherDimensions) {
  NIBBLE_NEEDS_GPU();
  for (const int32_t dim : {16, 40, 96, 136, 1024}) {
    check_case(latent_shape(3, dim), decode_lengths());
    check_case(latent_shape(4, dim, 16), {{5, 40}, {1, 130}});
  }
}

TEST(Latent, ACapturedStepServesOtherLengths) {
  NIBBLE_NEEDS_GPU();
  for (const LatentShape& shape :
       {latent_shape(16), latent_shape(64), coded_shape(KvCode::kInt8, 16),
        coded_shape(KvCode::kFp8, 64), coded_shape(KvCode::kInt4, 64)}) {
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
  LatentCase test(latent_shape(2, row_dim, 16), {{3, 35}, {1, 17}});
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

TEST(Latent, QueriesAreRotated) {
  NIBBLE_NEEDS_GPU();
  for (const bool interleaved : {true, false}) {
    for (const int32_t heads : {1, 3, 128}) {
      LatentCase test(latent_shape(heads, 576, 16), {{3, 35}, {1, 17}});
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
  EXPECT_TRUE(check_latent(latent_shape(64)).ok());
  EXPECT_TRUE(check_latent(latent_shape(7, 96, 16)).ok());
  EXPECT_FALSE(check_latent(latent_shape(64, 1032)).ok());
  EXPECT_FALSE(check_latent(latent_shape(64, 20)).ok());
  EXPECT_FALSE(check_latent(latent_shape(64, 576, 24)).ok());
  EXPECT_FALSE(check_latent(latent_shape(2048)).ok());
  EXPECT_TRUE(check_latent(coded_shape(KvCode::kInt8, 64)).ok());
  EXPECT_FALSE(check_latent(coded_shape(KvCode::kInt4, 8, 32)).ok());
  EXPECT_FALSE(check_latent({.code = KvCode::kInt8, .row_dim = 576, .heads = 8}).ok());
}

}  // namespace
}  // namespace nibble::cuda
