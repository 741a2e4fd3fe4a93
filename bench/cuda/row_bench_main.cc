// Times of the row-wise kernels and of sampling: medians over replays of a CUDA graph of many
// dependent launches, as in a decode step, so that data is in the L2 cache when it fits.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/row_kernels.h"
#include "backend/cuda/sampling.h"
#include "base/check.h"
#include "bench/cuda/bench_data.h"
#include "bench/cuda/bench_timer.h"

namespace nibble::cuda {
namespace {

constexpr int kLaunches = 20;
constexpr int kReplays = 15;

void require(cudaError_t error, const char* what) {
  const Status status = check(error, what);
  CHECK_MSG(status.ok(), "{}", status.message());
}

template <typename T>
T* allocate(size_t count) {
  T* data = nullptr;
  require(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(T)), "allocating");
  require(cudaMemset(data, 0, count * sizeof(T)), "clearing");
  return data;
}

/// Median microseconds of one call in a chain.
double time_chain(const std::function<cudaError_t(const LaunchContext&)>& call) {
  const auto timer = Timer::make().value();
  const Recording chain =
      timer
          ->record([&]() -> Status {
            for (int i = 0; i < kLaunches; ++i) {
              NIBBLE_RETURN_IF_ERROR(
                  check(call({.stream = timer->stream(), .overlap = true}), "launching"));
            }
            return {};
          })
          .value();
  std::vector<double> times;
  for (int i = 0; i < kReplays + 2; ++i) {
    times.push_back(timer->replay(chain).value());
  }
  times.erase(times.begin(), times.begin() + 2);
  return median(times) / kLaunches;
}

void report(const std::string& name, int64_t rows, int64_t n, double us, double bytes) {
  std::printf("%-24s rows %5lld  n %6lld  %9.2f us  %6.2f TB/s\n", name.c_str(),
              static_cast<long long>(rows), static_cast<long long>(n), us, bytes / us / 1e6);
}

void bench_rows() {
  constexpr int64_t kMaxRows = 8192;
  constexpr int64_t kMaxWidth = 14336;
  auto* x = allocate<float>(kMaxRows * kMaxWidth);
  auto* weight = allocate<float>(kMaxWidth);
  auto* out = allocate<uint16_t>(kMaxRows * kMaxWidth);
  auto* scales = allocate<float>(kMaxRows);
  require(random_activations(ActFormat::kBf16, x, kMaxRows * kMaxWidth * 2, 1, nullptr), "filling");
  const std::pair<const char*, ActFormat> formats[] = {
      {"bf16", ActFormat::kBf16}, {"int8", ActFormat::kInt8Token}, {"fp8", ActFormat::kFp8Token}};
  for (const auto& [name, format] : formats) {
    const QuantizedRows to{format, out, scales};
    const double out_bytes = format == ActFormat::kBf16 ? 2 : 1;
    for (const int64_t rows : {1, 64, 8192}) {
      for (const int64_t n : {4096, 8192}) {
        for (const auto& [norm, kind] : {std::pair{"rms_norm ", GemmInput::Kind::kRmsNorm},
                                         std::pair{"layer_norm ", GemmInput::Kind::kLayerNorm}}) {
          const NormArgs args{
              .x = x, .norm = {kind, weight, 1e-5F, weight}, .rows = rows, .n = n, .out = to};
          report(std::string(norm) + name, rows, n,
                 time_chain([&](const LaunchContext& c) { return norm_quantize(args, c); }),
                 static_cast<double>(rows * n) * (4 + out_bytes));
        }
      }
      for (const auto& [activation, kind] : {std::pair{"silu_mul ", GemmInput::Kind::kSiluMul},
                                             std::pair{"relu ", GemmInput::Kind::kRelu},
                                             std::pair{"gelu_tanh ", GemmInput::Kind::kGeluTanh}}) {
        const ActivationArgs args{.x = x, .kind = kind, .rows = rows, .n = kMaxWidth, .out = to};
        const auto bytes = 2.0 * static_cast<double>(input_width(kind, kMaxWidth)) +
                           out_bytes * static_cast<double>(kMaxWidth);
        report(std::string(activation) + name, rows, kMaxWidth,
               time_chain([&](const LaunchContext& c) { return activation_quantize(args, c); }),
               static_cast<double>(rows) * bytes);
      }
      if (format != ActFormat::kBf16) {
        const QuantizeRowsArgs rounding{.x = x, .rows = rows, .n = 4096, .out = to};
        report(std::string("quantize ") + name, rows, 4096,
               time_chain([&](const LaunchContext& c) { return quantize_rows(rounding, c); }),
               static_cast<double>(rows * 4096) * (2 + out_bytes));
      }
    }
  }
  for (void* p : {static_cast<void*>(x), static_cast<void*>(weight), static_cast<void*>(out),
                  static_cast<void*>(scales)}) {
    cudaFree(p);
  }
}

void bench_sampling() {
  constexpr int64_t kVocab = 128256;
  constexpr int64_t kMaxRows = 256;
  std::vector<float> host(kMaxRows * kVocab);
  uint64_t state = 1;
  for (float& logit : host) {  // sums of four uniform numbers: bell-shaped, spread 2.3
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      sum += static_cast<float>(state >> 40) * 0x1p-22F - 2.0F;
    }
    logit = sum;
  }
  auto* logits = allocate<float>(host.size());
  require(cudaMemcpy(logits, host.data(), host.size() * 4, cudaMemcpyHostToDevice), "copying");
  auto* sampling = allocate<RowSampling>(kMaxRows);
  auto* tokens = allocate<int32_t>(kMaxRows);
  auto* status = allocate<SampleStatus>(kMaxRows);
  auto* workspace = allocate<uint8_t>(sample_workspace_bytes(kMaxRows, 0));
  const std::pair<const char*, RowSampling> kinds[] = {
      {"greedy", {}},
      {"temperature 1", {.inverse_temperature = 1}},
      {"top-k 50", {.inverse_temperature = 1, .top_k = 50}},
      {"top-p 0.9, T 0.5", {.top_p = 0.9, .inverse_temperature = 2}},
      {"top-p 0.9, T 1 (flat)", {.top_p = 0.9, .inverse_temperature = 1}},
  };
  for (const auto& [name, kind] : kinds) {
    const std::vector<RowSampling> rows_kind(kMaxRows, kind);
    require(cudaMemcpy(sampling, rows_kind.data(), kMaxRows * sizeof(RowSampling),
                       cudaMemcpyHostToDevice),
            "copying");
    for (const int64_t rows : {1, 64, 256}) {
      const SampleArgs args{
          .range = kind.inverse_temperature > 0 ? SampleRange::kAny : SampleRange::kGreedy,
          .logits = logits,
          .stride = kVocab,
          .rows = rows,
          .vocab = kVocab,
          .sampling = sampling,
          .tokens = tokens,
          .status = status,
          .workspace = workspace,
          .max_rows = kMaxRows};
      report(name, rows, kVocab,
             time_chain([&](const LaunchContext& c) { return sample_tokens(args, c); }),
             static_cast<double>(rows * kVocab) * 4);
    }
  }
}

}  // namespace
}  // namespace nibble::cuda

int main() {
  nibble::cuda::bench_rows();
  nibble::cuda::bench_sampling();
  return 0;
}
