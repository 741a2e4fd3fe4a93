// Time of every scheme's product at shapes of real models, beside the read bandwidth of the same
// threads measured in the same run: bench_gemm [isa] [threads] [scheme].
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "backend/backend.h"
#include "base/thread_pool.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;

struct Shape {
  int64_t n;
  int64_t k;
};

constexpr Shape kShapes[] = {{4096, 4096}, {14336, 4096}, {4096, 14336}};  // Llama 3 8B
constexpr int64_t kRowCounts[] = {1, 4, 16, 128};
constexpr int kRepeats = 7;
constexpr int64_t kReadBytes = int64_t{512} << 20;   // beyond the caches
constexpr int64_t kWorkingSet = int64_t{400} << 20;  // copies of a matrix, so that none is cached

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// GB/s of summing 512 MiB with all threads, the best of some runs.
double read_bandwidth(ThreadPool& pool) {
  auto memory = Buffer::allocate(kReadBytes);
  if (!memory.ok()) {
    return 0.0;
  }
  std::memset(memory->data(), 1, memory->size());
  const uint64_t* words = memory->as<uint64_t>().data();
  const int64_t chunks = pool.threads() * 4;
  const int64_t per_chunk = kReadBytes / 8 / chunks / 16 * 16;
  std::vector<uint64_t> sums(static_cast<size_t>(chunks));
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = Clock::now();
    pool.parallel_for(chunks, [&](int64_t chunk, int) {
      uint64_t lanes[16] = {};
      const uint64_t* p = words + chunk * per_chunk;
      for (int64_t i = 0; i < per_chunk; i += 16) {
        __builtin_prefetch(p + i + 256);
        __builtin_prefetch(p + i + 264);
        for (int64_t j = 0; j < 16; ++j) {
          lanes[j] += p[i + j];
        }
      }
      sums[static_cast<size_t>(chunk)] = std::accumulate(lanes, lanes + 16, uint64_t{0});
    });
    best = std::min(best, seconds_since(start));
  }
  const uint64_t sum = std::accumulate(sums.begin(), sums.end(), uint64_t{0});
  return sum == 0 ? 0.0 : static_cast<double>(per_chunk * chunks * 8) / best * 1e-9;
}

Result<QuantTensor> make_weight(const QuantScheme& scheme, Shape shape) {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight,
                          QuantTensor::allocate(scheme.weight, shape.n, shape.k));
  std::memset(weight.codes.data(), 0x35, weight.codes.size());
  for (float& scale : weight.scales.as<float>()) {
    scale = 0.0078125F;
  }
  return weight;
}

Status bench_shape(Backend& backend, const QuantScheme& scheme, Shape shape, double read_gbs) {
  std::vector<std::unique_ptr<PreparedGemm>> copies;
  const int64_t most = *std::max_element(std::begin(kRowCounts), std::end(kRowCounts));
  do {
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, make_weight(scheme, shape));
    NIBBLE_ASSIGN_OR_RETURN(auto gemm, backend.prepare_gemm(std::move(weight), scheme.act, most));
    copies.push_back(std::move(gemm));
  } while (static_cast<int64_t>(copies.size()) * copies[0]->weight_bytes() < kWorkingSet);
  std::vector<float> x(static_cast<size_t>(most * shape.k));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i % 17) * 0.125F - 1.0F;
  }
  std::vector<float> y(static_cast<size_t>(most * shape.n));
  for (const int64_t m : kRowCounts) {
    const size_t used = m == 1 ? copies.size() : std::min<size_t>(copies.size(), 2);
    const GemmArgs args{x.data(), shape.k, m, y.data(), shape.n};
    double best = 1e9;
    for (int repeat = 0; repeat < (m == 1 ? kRepeats : 2); ++repeat) {
      const auto start = Clock::now();
      for (size_t i = 0; i < used; ++i) {
        copies[i]->run(args);
      }
      best = std::min(best, seconds_since(start) / static_cast<double>(used));
    }
    const double gbs = static_cast<double>(copies[0]->weight_bytes()) / best * 1e-9;
    const double gflops = 2e-9 * static_cast<double>(m * shape.n * shape.k) / best;
    fmt::print("{:26} n={:<6} k={:<6} m={:<4} {:9.1f} us {:7.2f} GB/s {:5.1f} % {:8.1f} GFLOPS\n",
               copies[0]->kernel_name(), shape.n, shape.k, m, best * 1e6, gbs,
               100.0 * gbs / read_gbs, gflops);
  }
  return {};
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  CpuBackendOptions options;
  options.isa = argc > 1 ? argv[1] : "auto";
  options.threads = argc > 2 ? std::atoi(argv[2]) : 0;
  auto backend = make_cpu_backend(options);
  if (!backend.ok()) {
    fmt::print(stderr, "{}\n", backend.status().message());
    return exit_code(backend.status().code());
  }
  double read_gbs = 0.0;
  {
    ThreadPool pool(options.threads);
    read_gbs = read_bandwidth(pool);
  }
  fmt::print("{}, {} threads, reads {:.1f} GB/s (100 %)\n", (*backend)->name(),
             (*backend)->threads(), read_gbs);
  for (const QuantScheme& scheme : all_schemes()) {
    if (argc > 3 && scheme.name != argv[3]) {
      continue;
    }
    for (const Shape shape : kShapes) {
      const Status status = bench_shape(**backend, scheme, shape, read_gbs);
      if (!status.ok()) {
        fmt::print(stderr, "{}\n", status.message());
        return exit_code(status.code());
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace nibble

int main(int argc, char** argv) { return nibble::run(argc, argv); }
