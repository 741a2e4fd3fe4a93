// Speed of latent attention. Decode: random caches of each type that do not fit into the L2 cache,
// as a chain of launches in a CUDA graph. Prefill, in bf16: the absorbed form beside the expanded
// one, with the products of heads. Prints rows of bench/results/h200-mla.json. Usage: latent_bench
// [bytes per second that the device reads at most [heads of decode alone, one number or several]].

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "backend/cuda/expanded_plan.h"
#include "backend/cuda/latent.h"
#include "base/check.h"
#include "base/f16.h"
#include "bench/cuda/bench_timer.h"
#include "bench/cuda/latent_prefill_bench.h"

namespace nibble::cuda {
namespace {

constexpr double kReadCeiling = 4.60e12;  // bytes/s, measured on an H200 (docs/kernels.md)
constexpr int kRowDim = 576;
constexpr int kValueDim = 512;
constexpr int kLaunches = 12;
constexpr int kReplays = 9;
constexpr size_t kLeastBytes = size_t{600} << 20;  // of the caches of a chain

struct Shape {
  KvCode code;
  int heads;
  int batch;
  int context;
};

LatentShape latent_shape(const Shape& shape) {
  return {.code = shape.code,
          .row_dim = kRowDim,
          .rope_dim = kRowDim - kValueDim,
          .heads = shape.heads,
          .scale = 1.0F / std::sqrt(static_cast<float>(kRowDim))};
}

/// Random numbers of moderate size as bf16.
uint16_t moderate(std::mt19937& random) {
  return static_cast<uint16_t>((random() & 0x80ffU) | 0x3e80U);
}

/// Repeats `piece` in `memory`.
Status fill(const DeviceMemory& memory, size_t bytes, const std::vector<uint8_t>& piece) {
  for (size_t at = 0; at < bytes; at += piece.size()) {
    NIBBLE_RETURN_IF_ERROR(
        check(cudaMemcpy(memory.as<std::byte>() + at, piece.data(),
                         std::min(piece.size(), bytes - at), cudaMemcpyHostToDevice),
              "filling a cache"));
  }
  return {};
}

std::vector<uint8_t> random_numbers() {
  std::vector<uint8_t> piece(size_t{16} << 20);
  std::mt19937 random(5);
  for (size_t at = 0; at < piece.size(); at += 2) {
    const uint16_t number = moderate(random);
    std::memcpy(piece.data() + at, &number, sizeof(number));
  }
  return piece;
}

/// 16 MiB of whole pages: random codes, none of them NaN, rotated keys of moderate size, and
/// parameters that make numbers of about 1.
std::vector<uint8_t> random_pages(const LatentShape& shape) {
  if (!shape.coded()) {
    return random_numbers();
  }
  const auto page_bytes = static_cast<size_t>(latent_page_bytes(shape));
  std::vector<uint8_t> pages((size_t{16} << 20) / page_bytes * page_bytes);
  std::mt19937 random(5);
  for (uint8_t& byte : pages) {
    byte = static_cast<uint8_t>(random() & 0xb7U);  // e4m3 up to 1.75
  }
  for (size_t begin = 0; begin < pages.size(); begin += page_bytes) {
    uint8_t* const page = pages.data() + begin;
    for (int32_t token = 0; token < shape.page_size; ++token) {
      for (int32_t dim = shape.rank(); dim < shape.row_dim; ++dim) {
        const uint16_t number = moderate(random);
        std::memcpy(page + latent_offset(shape, token, dim), &number, sizeof(number));
      }
      uint8_t* const params = page + latent_params_offset(shape, token);
      const float scale = shape.code == KvCode::kInt8 ? 1.0F / 127 : 0.5F;
      const uint16_t line[2] = {f32_to_f16(2.0F / 15), f32_to_f16(-1.0F)};
      for (int32_t at = 0; at < shape.param_bytes(); at += 4) {
        if (shape.code == KvCode::kInt4) {
          std::memcpy(params + at, line, sizeof(line));
        } else {
          std::memcpy(params + at, &scale, sizeof(scale));
        }
      }
    }
  }
  return pages;
}

template <typename T>
Result<DeviceMemory> upload(const std::vector<T>& values) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::allocate(values.size() * sizeof(T)));
  NIBBLE_RETURN_IF_ERROR(check(
      cudaMemcpy(memory.as<T>(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
      "uploading"));
  return memory;
}

/// Median microseconds of one launch.
Result<double> time_decode(const Shape& shape) {
  const LatentShape latent = latent_shape(shape);
  const int pages = (shape.context + latent.page_size - 1) / latent.page_size;
  std::vector<int32_t> table(static_cast<size_t>(shape.batch) * static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(1));
  std::vector<int32_t> numbers(static_cast<size_t>(shape.batch) + 1);
  std::iota(numbers.begin(), numbers.end(), 0);  // q_begin, and the rows' sequences
  const std::vector<int32_t> lengths(static_cast<size_t>(shape.batch), shape.context);
  const std::vector<int32_t> positions(static_cast<size_t>(shape.batch), shape.context - 1);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory device_table, upload(table));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory device_numbers, upload(numbers));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory device_lengths, upload(lengths));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory device_positions, upload(positions));
  const StepMetadata step{.q_begin = device_numbers.as<int32_t>(),
                          .kv_len = device_lengths.as<int32_t>(),
                          .page_table = device_table.as<int32_t>(),
                          .page_table_stride = pages,
                          .row_position = device_positions.as<int32_t>(),
                          .row_sequence = device_numbers.as<int32_t>(),
                          .sequences = shape.batch,
                          .rows = shape.batch};
  const size_t layer = table.size() * static_cast<size_t>(latent_page_bytes(latent));
  const size_t layers = std::clamp<size_t>(kLeastBytes / layer, 1, kLaunches);
  const auto width = static_cast<size_t>(shape.heads) * kRowDim;
  const size_t query_bytes = static_cast<size_t>(shape.batch) * width * 2;
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory cache, DeviceMemory::allocate(layer * layers));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory queries, DeviceMemory::allocate(query_bytes));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory out, DeviceMemory::allocate(query_bytes));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory plan, DeviceMemory::allocate(latent_plan_bytes(
                                                       latent, step.sequences, step.rows)));
  NIBBLE_ASSIGN_OR_RETURN(
      const DeviceMemory workspace,
      DeviceMemory::allocate(latent_workspace_bytes(latent, step.sequences) + 1));
  NIBBLE_RETURN_IF_ERROR(fill(cache, layer * layers, random_pages(latent)));
  NIBBLE_RETURN_IF_ERROR(fill(queries, query_bytes, random_numbers()));
  NIBBLE_ASSIGN_OR_RETURN(const auto timer, Timer::make());
  NIBBLE_RETURN_IF_ERROR(
      check(plan_latent(latent, step, plan.as<void>(), {timer->stream(), false}), "plan"));
  NIBBLE_RETURN_IF_ERROR(timer->wait());
  NIBBLE_ASSIGN_OR_RETURN(const Recording chain, timer->record([&] {
    for (size_t i = 0; i < kLaunches; ++i) {
      const LatentLaunch launch{.shape = latent,
                                .step = step,
                                .plan = plan.as<void>(),
                                .pages = cache.as<std::byte>() + i % layers * layer,
                                .q = queries.as<void>(),
                                .q_stride = static_cast<int64_t>(width),
                                .out = out.as<void>(),
                                .out_stride = static_cast<int64_t>(width),
                                .workspace = workspace.as<void>()};
      NIBBLE_RETURN_IF_ERROR(check(decode_latent(launch, {timer->stream()}), "attention"));
    }
    return Status();
  }));
  std::vector<double> times;
  for (int i = 0; i < kReplays; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const double us, timer->replay(chain));
    times.push_back(us);
  }
  times.erase(times.begin());  // warms up
  return median(times) / kLaunches;
}

int fail(const Status& status) {
  std::fprintf(stderr, "latent_bench: %s\n", status.message().c_str());
  return 1;
}

int run_decode(double ceiling, const std::vector<int>& head_counts) {
  constexpr int kCases[][2] = {{32, 4096}, {64, 8192}, {1, 131072}};
  constexpr KvCode kCodes[] = {KvCode::kBf16, KvCode::kFp8, KvCode::kInt8, KvCode::kInt4};
  std::printf("\"decode\": [");
  const char* separator = "";
  for (const int heads : head_counts) {
    for (const auto& [batch, context] : kCases) {
      double of_bf16 = 0.0;
      for (const KvCode code : kCodes) {
        const Shape shape{code, heads, batch, context};
        const auto us = time_decode(shape);
        if (!us.ok()) {
          return fail(us.status());
        }
        of_bf16 = code == KvCode::kBf16 ? *us : of_bf16;
        const LatentShape latent = latent_shape(shape);
        const double tokens = static_cast<double>(batch) * context;
        const double bytes =
            tokens * static_cast<double>(latent_page_bytes(latent)) / latent.page_size;
        std::printf(
            "%s\n  {\"heads\": %d, \"batch\": %d, \"context\": %d, \"cache\": \"%s\", "
            "\"us\": %.2f, \"read_percent\": %.1f, \"tflops\": %.1f, \"vs_bf16\": %.3f}",
            separator, heads, batch, context, kv_format(code).name, *us,
            bytes * 1e8 / *us / ceiling, 2e-6 * tokens * heads * (kRowDim + kValueDim) / *us,
            of_bf16 / *us);
        std::fflush(stdout);
        separator = ",";
      }
    }
  }
  std::printf("\n]");
  return 0;
}

/// TFLOPS are FlashAttention's count of the expanded form, 2 (192 + 128) for a head's pair of a row
/// and a token, over all the time; of attention alone, over what expansion leaves of it.
int run_prefill() {
  constexpr int kCached = 8192;
  std::vector<std::pair<int, int>> cases = {{2048, 2048}, {8192, 8192}, {32768, 32768}};
  for (const int rows : {1, 16, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192}) {
    cases.emplace_back(rows, kCached + rows);
  }
  std::printf("\"prefill\": [");
  const char* separator = "";
  for (const int heads : {64, 128, 16}) {
    for (const auto& [rows, kv_len] : cases) {
      const auto times = time_latent_prefill({.heads = heads, .rows = rows, .kv_len = kv_len});
      if (!times.ok()) {
        return fail(times.status());
      }
      const double pairs = static_cast<double>(rows) * (kv_len - rows) + 0.5 * rows * (rows + 1.0);
      const double flops = 2e-6 * pairs * heads * (kExpandedNope + kExpandedRope + kExpandedValue);
      const bool chosen = is_expanded(heads, {.rows = rows, .kv_len = kv_len});
      std::printf(
          "%s\n  {\"heads\": %d, \"rows\": %d, \"tokens\": %d, \"absorbed_us\": %.1f, "
          "\"expanded_us\": %.1f, \"expansion_us\": %.1f, \"absorbed_tflops\": %.1f, "
          "\"expanded_tflops\": %.1f, \"attention_tflops\": %.1f, \"chosen\": \"%s\"}",
          separator, heads, rows, kv_len, times->absorbed_us, times->expanded_us,
          times->expansion_us, flops / times->absorbed_us, flops / times->expanded_us,
          flops / (times->expanded_us - times->expansion_us), chosen ? "expanded" : "absorbed");
      std::fflush(stdout);
      separator = ",";
    }
  }
  std::printf("\n]");
  return 0;
}

int run(int count, char** arguments) {
  const double ceiling = count > 1 ? std::strtod(arguments[1], nullptr) : kReadCeiling;
  std::vector<int> heads;
  for (int i = 2; i < count; ++i) {
    heads.push_back(static_cast<int>(std::strtol(arguments[i], nullptr, 10)));
  }
  const bool all = heads.empty();
  std::printf("{");
  if (const int code = run_decode(ceiling, all ? std::vector{128, 64, 32, 16, 8} : heads);
      code != 0) {
    return code;
  }
  if (all) {
    std::printf(",\n");
    if (const int code = run_prefill(); code != 0) {
      return code;
    }
  }
  std::printf("}\n");
  return 0;
}

}  // namespace
}  // namespace nibble::cuda

int main(int count, char** arguments) { return nibble::cuda::run(count, arguments); }
