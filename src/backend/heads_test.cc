#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/prepared_heads.h"
#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_bf16.h"
#include "base/check.h"
#include "base/f16.h"

namespace nibble {
namespace {

struct Shape {
  int64_t heads = 1;
  int64_t n = 16;
  int64_t k = 16;
  int64_t m = 1;
  DType type = DType::kBF16;  // of weights and rows
};

/// Rows whose heads lie apart, in front of numbers that no head has.
class HeadsCase {
 public:
  explicit HeadsCase(const Shape& shape)
      : shape_(shape),
        x_head_(shape.k + 3),
        x_stride_(shape.heads * x_head_ + 5),
        x_(random_bf16_floats(shape.m * x_stride_, 1)),
        weights_(random_bf16_floats(shape.heads * shape.n * shape.k, 2)) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      const WeightCode code = shape.type == DType::kF32 ? WeightCode::kF32 : WeightCode::kBf16;
      tensors_.push_back(QuantTensor::allocate({.code = code}, shape.n, shape.k).value());
      const float* from = weights_.data() + head * shape.n * shape.k;
      if (shape.type == DType::kF32) {
        std::copy_n(from, shape.n * shape.k, tensors_.back().codes.as<float>().begin());
      } else {
        std::transform(from, from + shape.n * shape.k, tensors_.back().codes.as<uint16_t>().begin(),
                       f32_to_bf16);
      }
    }
  }

  /// [m, heads, n], of the backend's heads.
  std::vector<float> run(Backend& backend) {
    std::vector<QuantView> views;
    for (const QuantTensor& tensor : tensors_) {
      views.push_back(view_of(tensor));
    }
    const ActFormat act = shape_.type == DType::kF32 ? ActFormat::kFloat : ActFormat::kBf16;
    const auto heads = backend.prepare_heads(views, act, shape_.m).value();
    EXPECT_GE(heads->weight_bytes(), shape_.heads * shape_.n * shape_.k * 2);
    std::vector<float> y(static_cast<size_t>(shape_.m * shape_.heads * shape_.n),
                         std::numeric_limits<float>::quiet_NaN());
    std::vector<uint16_t> narrow = to_bf16(x_);
    const bool f32 = shape_.type == DType::kF32;
    heads->run(
        {.x = f32 ? ConstActivations(x_.data()) : ConstActivations(narrow.data(), shape_.type),
         .x_stride = x_stride_,
         .x_head = x_head_,
         .m = shape_.m,
         .y = y.data(),
         .y_stride = shape_.heads * shape_.n,
         .y_head = shape_.n});
    return y;
  }

  /// The same in double precision.
  [[nodiscard]] std::vector<float> expected() const {
    std::vector<float> y;
    for (int64_t row = 0; row < shape_.m; ++row) {
      for (int64_t head = 0; head < shape_.heads; ++head) {
        const float* x = x_.data() + row * x_stride_ + head * x_head_;
        for (int64_t i = 0; i < shape_.n; ++i) {
          const float* w = weights_.data() + (head * shape_.n + i) * shape_.k;
          double sum = 0.0;
          for (int64_t j = 0; j < shape_.k; ++j) {
            sum += static_cast<double>(x[j]) * w[j];
          }
          y.push_back(static_cast<float>(sum));
        }
      }
    }
    return y;
  }

 private:
  Shape shape_;
  int64_t x_head_;
  int64_t x_stride_;
  std::vector<float> x_;
  std::vector<float> weights_;
  std::vector<QuantTensor> tensors_;
};

class HeadsTest : public testing::TestWithParam<std::string_view> {};

TEST_P(HeadsTest, EachHeadIsMultipliedByItsMatrix) {
  const Shape shapes[] = {
      {},
      {.heads = 3, .n = 40, .k = 24, .m = 5},
      {.heads = 16, .n = 512, .k = 128, .m = 1},
      {.heads = 5, .n = 128, .k = 512, .m = 19},
      {.heads = 7, .n = 72, .k = 40, .m = 33, .type = DType::kF32},
      {.heads = 2, .n = 17, .k = 65, .m = 2, .type = DType::kF32},
      {.heads = 64, .n = 16, .k = 1024, .m = 150},  // rows in several parts
  };
  for (const int threads : {1, 3}) {
    auto backend =
        make_cpu_backend(
            {.threads = threads, .isa = std::string(GetParam()), .limit = ThreadLimit::kNone})
            .value();
    for (const Shape& shape : shapes) {
      HeadsCase test(shape);
      const std::vector<float> expected = test.expected();
      const std::vector<float> actual = test.run(*backend);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(actual[i], expected[i], 1e-4 * std::sqrt(static_cast<double>(shape.k)))
            << shape.heads << " heads of " << shape.n << " x " << shape.k << ", number " << i;
      }
    }
  }
}

TEST(Heads, CpusMultiplyInOneDirectionAlone) {
  const std::vector<float> weights = random_bf16_floats(16 * 16, 3);
  QuantTensor tensor = QuantTensor::allocate({.code = WeightCode::kF32}, 16, 16).value();
  std::copy(weights.begin(), weights.end(), tensor.codes.as<float>().begin());
  const QuantView view = view_of(tensor);
  auto backend = make_cpu_backend({.threads = 1}).value();
  const auto heads = backend->prepare_heads({&view, 1}, ActFormat::kFloat, 1).value();
  EXPECT_FALSE(heads->has_transposed());
  EXPECT_THROW(heads->run_transposed({}), InternalError);
}

INSTANTIATE_TEST_SUITE_P(InstructionSets,
                         HeadsTest,
                         testing::ValuesIn(cpu::supported_isas()),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace nibble
