#include "bench/cuda/schedules/act_bench.h"

#include <cstdio>
#include <optional>
#include <utility>

#include "backend/cuda/row_kernels.h"
#include "bench/cuda/bench_data.h"
#include "bench/cuda/schedules/act_rows.h"
#include "bench/cuda/schedules/mixed_timer.h"

namespace nibble::cuda {
namespace {

constexpr int kTurns = 3;
constexpr int kRowWidths[] = {4096, 8192};

struct Times {
  double bytes = 0.0, nibbles = 0.0;

  [[nodiscard]] double ratio() const { return bytes / nibbles; }
};

class Bench final {
 public:
  Bench(const DeviceInfo& device, const ScheduleBenchOptions& options)
      : device_(device), options_(options), timer_(device, options.replays) {}

  Result<Json> run() {
    NIBBLE_RETURN_IF_ERROR(timer_.start());
    std::printf("%-12s %5s %8s %10s %10s %6s\n", "shape", "m", "tile", "bytes us", "nibbles us",
                "times");
    for (const ScheduleShape& shape : options_.shapes) {
      for (const int m : options_.row_counts) {
        NIBBLE_RETURN_IF_ERROR(measure(shape, m));
      }
    }
    for (const int k : kRowWidths) {
      for (const int m : options_.row_counts) {
        NIBBLE_RETURN_IF_ERROR(measure_rows(static_cast<size_t>(m), static_cast<size_t>(k)));
      }
    }
    return Json::object({{"device", device_.name},
                         {"bf16_percent", options_.bf16_percent},
                         {"act_products", std::move(products_)},
                         {"act_rows", std::move(rows_)}});
  }

 private:
  /// Medians of turns. time(store) gives the time of one.
  template <typename Time>
  static Result<Times> in_turns(const Time& time) {
    std::vector<double> us[2];
    for (int turn = 0; turn < kTurns; ++turn) {
      for (const ActStore store : {ActStore::kBytes, ActStore::kNibbles}) {
        NIBBLE_ASSIGN_OR_RETURN(const double one, time(store));
        us[static_cast<int>(store)].push_back(one);
      }
    }
    return Times{median(us[0]), median(us[1])};
  }

  Status measure(const ScheduleShape& shape, int m) {
    const MixedProblem problem{.n = shape.n,
                               .k = shape.k,
                               .m = m,
                               .bf16 = last_blocks(shape.k / 128, options_.bf16_percent),
                               .act_bits = 4};
    const size_t copies = timer_.copies_of(static_cast<size_t>(shape.n) * shape.k / 2);
    NIBBLE_ASSIGN_OR_RETURN(const MixedData data,
                            MixedData::make(problem, copies, timer_.stream()));
    std::optional<Times> best;
    const std::vector<MixedTile> all = mixed_tiles();
    for (const MixedTile& tile : all) {
      if (tile.form != MixedForm::kFull || !suits(tile, m)) {
        continue;
      }
      const auto nibbles = std::find_if(all.begin(), all.end(), [&](const MixedTile& other) {
        return other.form == MixedForm::kNibbles && other.tokens == tile.tokens &&
               other.row_blocks == tile.row_blocks;
      });
      if (nibbles == all.end()) {
        return make_error(StatusCode::kCorrupt, "a form lacks a tile");
      }
      const int unit_blocks = choose_unit_blocks(problem, tile, device_.sms);
      NIBBLE_ASSIGN_OR_RETURN(const Times times, in_turns([&](ActStore store) {
                                return timer_.time_mixed(
                                    data, copies, store == ActStore::kBytes ? tile : *nibbles,
                                    MixedSchedule::kDecomposed, unit_blocks);
                              }));
      report(shape, m, fmt::format("{}x{}", 64 * tile.row_blocks, tile.tokens), times);
      best = best
                 ? Times{std::min(best->bytes, times.bytes), std::min(best->nibbles, times.nibbles)}
                 : times;
    }
    if (!best) {
      return make_error(StatusCode::kCorrupt, "no tile for {} tokens", m);
    }
    report(shape, m, "best", *best);
    return {};
  }

  void report(const ScheduleShape& shape, int m, const std::string& tile, const Times& times) {
    const std::string name =
        shape.name.empty() ? fmt::format("{}x{}", shape.n, shape.k) : shape.name;
    std::printf("%-12s %5d %8s %10.2f %10.2f %6.3f\n", name.c_str(), m, tile.c_str(), times.bytes,
                times.nibbles, times.ratio());
    std::fflush(stdout);
    products_.push_back(Json::object({{"shape", name},
                                      {"m", m},
                                      {"n", shape.n},
                                      {"k", shape.k},
                                      {"bf16_percent", options_.bf16_percent},
                                      {"tile", tile},
                                      {"bytes_us", times.bytes},
                                      {"nibbles_us", times.nibbles},
                                      {"bytes_over_nibbles", times.ratio()}}));
  }

  /// Rows are read from memory, as the products' weights are.
  Status measure_rows(size_t m, size_t k) {
    const size_t count = m * k, copies = timer_.copies_of(count * 4);
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory x, DeviceMemory::allocate(copies * count * 4));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory weight, DeviceMemory::allocate(k * 4));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory codes, DeviceMemory::allocate(copies * count));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory scales, DeviceMemory::allocate(copies * m * 4));
    cudaStream_t stream = timer_.stream();
    const auto filled = [](cudaError_t error) { return check(error, "filling rows"); };
    NIBBLE_RETURN_IF_ERROR(
        filled(random_activations(ActFormat::kBf16, x.as<void>(), 2 * copies * count, 1, stream)));
    NIBBLE_RETURN_IF_ERROR(filled(random_scales(weight.as<float>(), k, false, 2, stream)));
    NIBBLE_RETURN_IF_ERROR(timer_.wait());
    NIBBLE_ASSIGN_OR_RETURN(const Times times, in_turns([&](ActStore store) {
                              return timer_.time(copies, [&](size_t copy) {
                                return write_act_rows({.x = x.as<float>() + copy * count,
                                                       .weight = weight.as<float>(),
                                                       .rows = static_cast<int64_t>(m),
                                                       .n = static_cast<int64_t>(k),
                                                       .store = store,
                                                       .codes = codes.as<uint8_t>() + copy * count,
                                                       .scales = scales.as<float>() + copy * m},
                                                      {.stream = stream});
                              });
                            }));
    NIBBLE_ASSIGN_OR_RETURN(const double int8, timer_.time(copies, [&](size_t copy) {
      return norm_quantize({.x = x.as<float>() + copy * count,
                            .norm = {GemmInput::Kind::kRmsNorm, weight.as<float>(), ActRows::kEps},
                            .rows = static_cast<int64_t>(m),
                            .n = static_cast<int64_t>(k),
                            .out = {ActFormat::kInt8Token, codes.as<uint8_t>() + copy * count,
                                    scales.as<float>() + copy * m}},
                           {.stream = stream});
    }));
    std::printf("rows of %4zu %5zu %8s %10.2f %10.2f %6.3f, INT8 %.2f\n", k, m, "", times.bytes,
                times.nibbles, times.ratio(), int8);
    std::fflush(stdout);
    rows_.push_back(Json::object({{"m", static_cast<int64_t>(m)},
                                  {"k", static_cast<int64_t>(k)},
                                  {"bytes_us", times.bytes},
                                  {"nibbles_us", times.nibbles},
                                  {"bytes_over_nibbles", times.ratio()},
                                  {"int8_us", int8}}));
    return {};
  }

  const DeviceInfo& device_;
  const ScheduleBenchOptions& options_;
  MixedTimer timer_;
  JsonArray products_, rows_;
};

}  // namespace

Result<Json> bench_act_stores(const DeviceInfo& device, const ScheduleBenchOptions& options) {
  return Bench(device, options).run();
}

}  // namespace nibble::cuda
