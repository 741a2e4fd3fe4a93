#include "backend/cuda/testing/gemm_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <random>

#include "backend/cuda/row_kernels.h"
#include "backend/cuda/testing/gpu_test.h"
#include "base/f16.h"
#include "quant/codec.h"
#include "quant/quant_tensor.h"
#include "quant/testing/random_levels.h"

namespace nibble::cuda::testing {
namespace {

float random_float(std::mt19937& random) {
  return std::normal_distribution<float>(0.0F, 1.0F)(random);
}

QuantTensor random_weight(const WeightFormat& format,
                          const GemmCheck& check,
                          std::mt19937& random) {
  QuantTensor weight = QuantTensor::allocate(format, check.n, check.k).value();
  auto* bytes = reinterpret_cast<uint8_t*>(weight.codes.data());
  for (size_t i = 0; i < weight.codes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(random());
    if (format.code == WeightCode::kFp8E4M3 && (bytes[i] & 0x7f) == 0x7f) {
      bytes[i] = 0x7e;
    }
  }
  if (format.code == WeightCode::kBf16) {
    for (uint16_t& value : weight.codes.as<uint16_t>()) {
      value = f32_to_bf16(random_float(random));
    }
  }
  for (float& scale : weight.scales.as<float>()) {
    scale = bf16_to_f32(f32_to_bf16(0.01F * (1.0F + std::fabs(random_float(random)))));
    if (format.scale_dtype == DType::kF8E8M0) {
      scale = std::exp2(std::floor(std::log2(scale)));
    }
  }
  for (int8_t& zero : weight.zeros.as<int8_t>()) {
    zero = static_cast<int8_t>(random() % 16 - 8);
  }
  for (float& minimum : weight.minimums.as<float>()) {
    minimum = bf16_to_f32(f32_to_bf16(0.08F * random_float(random)));
  }
  make_levels(weight, random);
  return weight;
}

/// Activations as the kernel reads them and their values.
struct Activations {
  std::vector<uint8_t> data;
  std::vector<float> scales;  // [m, row_scales()], at least one of a row
  std::vector<double> values;
};

Activations random_activations(ActFormat act, int64_t m, int64_t k, std::mt19937& random) {
  const auto count = static_cast<size_t>(m * k);
  Activations x;
  x.data.resize(act == ActFormat::kBf16 ? count * 2 : count);
  const auto width = static_cast<size_t>(k);
  const auto groups = static_cast<size_t>(std::max<int64_t>(1, row_scales(act, k)));
  const size_t group_size = act == ActFormat::kFp8Group ? kFp8GroupSize : width;
  x.scales.resize(static_cast<size_t>(m) * groups);
  x.values.resize(count);
  for (float& scale : x.scales) {
    scale = 0.02F * (1.0F + std::fabs(random_float(random)));
  }
  for (size_t i = 0; i < count; ++i) {
    const double scale = x.scales[i / width * groups + i % width / group_size];
    if (act == ActFormat::kBf16) {
      const uint16_t value = f32_to_bf16(random_float(random));
      std::memcpy(x.data.data() + 2 * i, &value, 2);
      x.values[i] = bf16_to_f32(value);
    } else if (act == ActFormat::kInt8Token) {
      x.data[i] = static_cast<uint8_t>(random());
      x.values[i] = scale * static_cast<int8_t>(x.data[i]);
    } else {
      const auto code = static_cast<uint8_t>(random());
      x.data[i] = (code & 0x7f) == 0x7f ? 0x38 : code;
      x.values[i] = scale * decode_e4m3(x.data[i]);
    }
  }
  return x;
}

std::vector<double> reference(const QuantTensor& weight, const Activations& x, int64_t m) {
  std::vector<double> y(static_cast<size_t>(m * weight.n));
  std::vector<float> row(static_cast<size_t>(weight.k));
  for (int64_t n = 0; n < weight.n; ++n) {
    decode_row(weight, n, row.data());
    for (int64_t i = 0; i < m; ++i) {
      const double* values = x.values.data() + i * weight.k;
      double sum = 0.0;
      for (int64_t k = 0; k < weight.k; ++k) {
        sum += values[k] * row[static_cast<size_t>(k)];
      }
      y[static_cast<size_t>(i * weight.n + n)] = sum;
    }
  }
  return y;
}

/// One family on one matrix, ready to run.
class Bench final {
 public:
  Bench(const GemmEntry& entry, const GemmCheck& check) : check_(check), random_(check.seed) {
    scheme_ = check.format.has_value() ? QuantScheme{check.scheme, *check.format}
                                       : find_scheme(check.scheme).value();
    act_ = scheme_.act == ActFormat::kFloat ? ActFormat::kBf16 : scheme_.act;
    const GemmProblem problem{.weight = scheme_.weight, .act = act_, .n = check.n, .k = check.k};
    const DeviceInfo device = query_device(0).value();
    EXPECT_TRUE(entry.accepts(problem, device));
    kernel_ = entry.make(problem, device).value();
  }

  void run() {
    const QuantTensor weight = random_weight(scheme_.weight, check_, random_);
    const auto* code_bytes = reinterpret_cast<const uint8_t*>(weight.codes.data());
    const std::vector<uint8_t> codes(code_bytes, code_bytes + weight.codes.size());
    const auto weight_scales = weight.scales.as<float>();
    std::vector<float> scales(weight_scales.begin(), weight_scales.end());
    std::ranges::copy(weight.zeros.as<int8_t>(), std::back_inserter(scales));
    std::ranges::copy(weight.minimums.as<float>(), std::back_inserter(scales));
    const DeviceArray<uint8_t> device_codes(codes), packed(kernel_->packed_bytes());
    const DeviceArray<float> device_scales(scales);
    ASSERT_EQ(kernel_->pack(device_codes.data(), device_scales.data(), packed.data(), nullptr),
              cudaSuccess);
    const DeviceArray<uint8_t> codes_back(codes.size());
    const DeviceArray<float> scales_back(scales.size());
    ASSERT_EQ(kernel_->unpack(packed.data(), codes_back.data(), scales_back.data(), nullptr),
              cudaSuccess);
    EXPECT_EQ(codes_back.host(), codes);
    EXPECT_EQ(scales_back.host(), scales);
    for (const int64_t m : check_.row_counts) {
      run_rows(weight, packed, m);
    }
  }

 private:
  void run_rows(const QuantTensor& weight, const DeviceArray<uint8_t>& packed, int64_t m) {
    const Activations x = random_activations(act_, m, weight.k, random_);
    const std::vector<double> expected = reference(weight, x, m);
    std::vector<float> bias(static_cast<size_t>(weight.n));
    for (float& value : bias) {
      value = bf16_to_f32(f32_to_bf16(random_float(random_)));
    }
    const DeviceArray<uint8_t> device_x(x.data);
    const DeviceArray<float> device_scales(x.scales), device_bias(bias);
    DeviceArray<uint8_t> workspace(kernel_->workspace_bytes(m));
    workspace.zero();
    for (const bool biased : {false, true}) {
      if (!biased && brief_tests()) {
        continue;
      }
      GemmLaunch args{.x = device_x.data(),
                      .x_scales = device_scales.data(),
                      .packed = packed.data(),
                      .bias = biased ? device_bias.data() : nullptr,
                      .y_stride = weight.n + 24,
                      .m = m,
                      .workspace = workspace.data()};
      SCOPED_TRACE(::testing::Message() << check_.scheme << " n " << weight.n << " k " << weight.k
                                        << " m " << m << (biased ? " bias" : ""));
      run_result<uint16_t>(args, expected, biased ? bias : std::vector<float>());
      run_result<float>(args, expected, biased ? bias : std::vector<float>());
    }
    std::vector<uint8_t> counters = workspace.host();
    counters.resize(std::min(counters.size(), kGemmCounterBytes));
    for (const uint8_t byte : counters) {
      ASSERT_EQ(byte, 0) << "the workspace's counters were not left zero, m " << m;
    }
  }

  /// T: uint16_t for bf16 or float, which is also tried with kAddF32.
  template <typename T>
  void run_result(GemmLaunch args,
                  const std::vector<double>& expected,
                  const std::vector<float>& bias) {
    constexpr bool kF32 = sizeof(T) == 4;
    const auto size = static_cast<size_t>(args.m * args.y_stride);
    const std::vector<T> start(size, kF32 ? T(3) : T(0xffff));
    for (const bool add : {false, true}) {
      if ((add && !kF32) || (!add && kF32 && brief_tests())) {
        continue;
      }
      args.result = !kF32 ? GemmResult::kBf16 : add ? GemmResult::kAddF32 : GemmResult::kF32;
      const DeviceArray<T> y(start), again(start);
      args.y = y.data();
      ASSERT_EQ(kernel_->run(args, {}), cudaSuccess);
      if (!brief_tests()) {
        args.y = again.data();
        ASSERT_EQ(kernel_->run(args, {}), cudaSuccess);
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<T> values = y.host();
      const std::vector<T> repeated = brief_tests() ? values : again.host();
      EXPECT_EQ(std::memcmp(values.data(), repeated.data(), size * sizeof(T)), 0)
          << "not repeatable";
      compare(args, values, expected, bias, add ? 3.0 : 0.0);
    }
  }

  template <typename T>
  void compare(const GemmLaunch& args,
               const std::vector<T>& values,
               const std::vector<double>& expected,
               const std::vector<float>& bias,
               double added) {
    double difference = 0.0, total = 0.0, worst = 0.0;
    size_t worst_at = 0;
    for (int64_t row = 0; row < args.m; ++row) {
      for (int64_t column = 0; column < args.y_stride; ++column) {
        const T raw = values[static_cast<size_t>(row * args.y_stride + column)];
        if (column >= check_.n) {
          ASSERT_EQ(raw, sizeof(T) == 4 ? T(3) : T(0xffff)) << "written past n";
          continue;
        }
        const double got =
            sizeof(T) == 4 ? static_cast<double>(raw) : bf16_to_f32(static_cast<uint16_t>(raw));
        const auto at = static_cast<size_t>(row * check_.n + column);
        const double want =
            expected[at] + added + (bias.empty() ? 0.0 : bias[static_cast<size_t>(column)]);
        difference += (got - want) * (got - want);
        total += want * want;
        if (!(std::fabs(got - want) <= worst)) {
          worst = std::fabs(got - want);
          worst_at = at;
        }
      }
    }
    const double error = std::sqrt(difference / total);
    EXPECT_LE(error, check_.tolerance + (sizeof(T) == 4 ? 0.0 : 0x1p-8))
        << "result " << static_cast<int>(args.result) << ", largest difference " << worst
        << " at row " << worst_at / static_cast<size_t>(check_.n) << " column "
        << worst_at % static_cast<size_t>(check_.n);
  }

  GemmCheck check_;
  std::mt19937 random_;
  QuantScheme scheme_;
  ActFormat act_ = ActFormat::kBf16;
  std::unique_ptr<GemmKernel> kernel_;
};

}  // namespace

void check_gemm(const GemmEntry& entry, const GemmCheck& check) {
  Bench bench(entry, check);
  bench.run();
}

}  // namespace nibble::cuda::testing
