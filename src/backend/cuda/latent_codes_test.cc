#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cuda/latent.h"
#include "backend/cuda/testing/gpu_test.h"
#include "backend/cuda/testing/latent_case.h"
#include "base/f16.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

using testing::bf16_bits;
using testing::bf16_values;
using testing::check_case;
using testing::coded_shape;
using testing::decode_lengths;
using testing::DeviceArray;
using testing::kFastValues;
using testing::LatentCase;
using testing::LatentSequence;

TEST(LatentCodes, RowsInCodes) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kInt8, KvCode::kFp8, KvCode::kInt4}) {
    for (const int32_t heads : {1, 5, 8, 12, 16, 20, 64, 96, 128}) {
      check_case(coded_shape(code, heads), decode_lengths());
    }
    for (const int32_t page : {16, 48, 128}) {
      check_case(coded_shape(code, 16, kFastValues, page), decode_lengths());
      check_case(coded_shape(code, 64, kFastValues, page), decode_lengths());
    }
  }
}

TEST(LatentCodes, RowsInCodesOfManyTokensAndQueries) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kInt8, KvCode::kFp8, KvCode::kInt4}) {
    for (const int32_t heads : {3, 16, 33, 64}) {
      check_case(coded_shape(code, heads), {{1, 9001}});
      check_case(coded_shape(code, heads), {{3, 130}, {1, 64}, {2, 2}, {4, 700}, {1, 300}});
      check_case(coded_shape(code, heads), {{17, 200}, {1, 64}, {2, 66}});
      std::vector<LatentSequence> many;
      for (int32_t i = 0; i < 150; ++i) {
        many.push_back({1, 1 + i * 37 % 300});
      }
      check_case(coded_shape(code, heads), many);
    }
    check_case(coded_shape(code, 5), {{131, 140}, {37, 200}});
    if (code != KvCode::kInt4) {  // by the kernel for any shape
      check_case(coded_shape(code, 3, 32), decode_lengths());
      check_case(coded_shape(code, 4, 136, 16), {{5, 40}, {1, 130}});
    }
  }
}

/// What codes of number d of a row make, and how far it may be from what was stored.
std::pair<double, double> decoded(const LatentShape& shape,
                                  const uint8_t* page,
                                  int32_t slot,
                                  int32_t d) {
  const uint8_t bits = page[latent_offset(shape, slot, d)];
  const uint8_t* const params = page + latent_params_offset(shape, slot);
  if (shape.code == KvCode::kInt4) {
    uint16_t line[2];
    std::memcpy(line, params + d / testing::kLatentGroup * 4, sizeof(line));
    const double scale = f16_to_f32(line[0]);
    // The best of seven ranges clips at most 0.3 of the whole, which has 15 steps.
    return {(d % 2 == 0 ? bits & 15 : bits >> 4) * scale + f16_to_f32(line[1]), 4.0 * scale};
  }
  float scale = 0.0F;
  std::memcpy(&scale, params, sizeof(scale));
  if (shape.code == KvCode::kInt8) {
    return {static_cast<double>(scale) * static_cast<int8_t>(bits), 0.51 * scale};
  }
  const double value = static_cast<double>(scale) * decode_e4m3(bits);
  return {value, 0.07 * std::fabs(value) + scale};
}

/// Rows of numbers, one of them zeros and one not finite, appended as codes and taken apart again.
void check_coded_rows(KvCode code, int32_t rank) {
  SCOPED_TRACE(fmt::format("{} numbers in {}", rank, kv_code_name(code)));
  LatentCase test(coded_shape(code, 2, rank, 16), {{3, 35}, {1, 17}});
  const int32_t dim = test.shape.row_dim;
  const std::vector<float> norm(static_cast<size_t>(rank), 1.0F);
  const std::vector<float> inv_freq(static_cast<size_t>(test.shape.rope_dim / 2), 0.0F);
  std::vector<float> rows = bf16_values(static_cast<size_t>(4 * dim), 7);
  std::fill_n(rows.begin() + dim, rank, 0.0F);
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
    if (row == 3) {
      EXPECT_TRUE(std::isnan(decoded(test.shape, page, position % 16, 5).first));
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
      const auto [got, step] = decoded(test.shape, page, position % 16, d);
      ASSERT_NEAR(got, want, step + 1e-6) << "row " << row << ", number " << d;
    }
  }
}

TEST(LatentCodes, RowsAreAppendedAsCodes) {
  NIBBLE_NEEDS_GPU();
  for (const KvCode code : {KvCode::kInt8, KvCode::kFp8, KvCode::kInt4}) {
    check_coded_rows(code, kFastValues);
  }
  for (const int32_t rank : {32, 1016}) {
    check_coded_rows(KvCode::kInt8, rank);
    check_coded_rows(KvCode::kFp8, rank);
  }
}

}  // namespace
}  // namespace nibble::cuda
