#include "bench/cuda/schedules/schedule_bench.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "base/math.h"
#include "bench/cuda/bench_data.h"
#include "bench/cuda/schedules/mixed_timer.h"
#include "quant/scheme.h"

namespace nibble::cuda {
namespace {

struct Variant {
  std::string_view name;
  MixedSchedule schedule;
  MixedForm form;
};

constexpr Variant kVariants[] = {
    {"lock_step", MixedSchedule::kLockStep, MixedForm::kFull},
    {"round_robin", MixedSchedule::kRoundRobin, MixedForm::kFull},
    {"balanced", MixedSchedule::kBalanced, MixedForm::kFull},
    {"remapped", MixedSchedule::kRemapped, MixedForm::kFull},
    {"decomposed", MixedSchedule::kDecomposed, MixedForm::kFull},
    {"lock_step-no_pipeline", MixedSchedule::kLockStep, MixedForm::kNoPipeline},
    {"round_robin-no_pipeline", MixedSchedule::kRoundRobin, MixedForm::kNoPipeline},
    {"remapped-no_pipeline", MixedSchedule::kRemapped, MixedForm::kNoPipeline},
    {"decomposed-no_pipeline", MixedSchedule::kDecomposed, MixedForm::kNoPipeline},
    {"lock_step-no_interleave", MixedSchedule::kLockStep, MixedForm::kNoInterleave},
    {"round_robin-no_interleave", MixedSchedule::kRoundRobin, MixedForm::kNoInterleave},
    {"remapped-no_interleave", MixedSchedule::kRemapped, MixedForm::kNoInterleave},
    {"decomposed-no_interleave", MixedSchedule::kDecomposed, MixedForm::kNoInterleave},
    {"lock_step-sign_extension", MixedSchedule::kLockStep, MixedForm::kSignExtension},
    {"round_robin-sign_extension", MixedSchedule::kRoundRobin, MixedForm::kSignExtension},
    {"remapped-sign_extension", MixedSchedule::kRemapped, MixedForm::kSignExtension},
    {"decomposed-sign_extension", MixedSchedule::kDecomposed, MixedForm::kSignExtension},
};

class Bench final {
 public:
  Bench(const DeviceInfo& device, const ScheduleBenchOptions& options)
      : device_(device), options_(options), timer_(device, options.replays) {}

  Result<Json> run() {
    NIBBLE_RETURN_IF_ERROR(timer_.start());
    std::printf("%-12s %5s %-26s %6s %10s %8s %8s %8s\n", "shape", "m", "variant", "tile", "us",
                "TOPS", "w4a16/us", "optimum");
    for (const ScheduleShape& shape : options_.shapes) {
      for (const int m : options_.row_counts) {
        NIBBLE_RETURN_IF_ERROR(measure(shape, m));
      }
    }
    return Json::object({{"device", device_.name},
                         {"bf16_percent", options_.bf16_percent},
                         {"schedules", std::move(rows_)}});
  }

 private:
  /// One of the program's products.
  Result<double> time_entry(const GemmEntry& entry, ActFormat act, const MixedProblem& problem) {
    const GemmProblem wanted{.weight = {.code = WeightCode::kInt4, .scale_per = ScalePer::kChannel},
                             .act = act,
                             .n = problem.n,
                             .k = problem.k};
    NIBBLE_ASSIGN_OR_RETURN(const auto kernel, entry.make(wanted, device_));
    const auto n = static_cast<size_t>(problem.n), k = static_cast<size_t>(problem.k);
    const auto m = static_cast<size_t>(problem.m);
    const size_t stride = round_up(kernel->packed_bytes(), 1024), copies = timer_.copies_of(stride);
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory codes, DeviceMemory::allocate(n * k / 2));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory scales, DeviceMemory::allocate(n * 4));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory x, DeviceMemory::allocate(m * k * 2));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory x_scales, DeviceMemory::allocate(m * 4));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory y, DeviceMemory::allocate(m * n * 2));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory packed, DeviceMemory::allocate(stride * copies));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory workspace,
                            DeviceMemory::allocate(kernel->workspace_bytes(problem.m)));
    cudaStream_t stream = timer_.stream();
    const auto filled = [](cudaError_t error) { return check(error, "filling operands"); };
    NIBBLE_RETURN_IF_ERROR(
        filled(random_codes(WeightCode::kInt4, codes.as<void>(), n * k / 2, 1, stream)));
    NIBBLE_RETURN_IF_ERROR(filled(random_scales(scales.as<float>(), n, false, 2, stream)));
    NIBBLE_RETURN_IF_ERROR(filled(random_activations(act, x.as<void>(), m * k, 3, stream)));
    NIBBLE_RETURN_IF_ERROR(filled(random_scales(x_scales.as<float>(), m, false, 4, stream)));
    for (size_t copy = 0; copy < copies; ++copy) {
      NIBBLE_RETURN_IF_ERROR(filled(kernel->pack(codes.as<void>(), scales.as<float>(),
                                                 packed.as<uint8_t>() + copy * stride, stream)));
    }
    NIBBLE_RETURN_IF_ERROR(timer_.wait());
    return timer_.time(copies, [&](size_t copy) {
      return kernel->run({.x = x.as<void>(),
                          .x_scales = x_scales.as<float>(),
                          .packed = packed.as<uint8_t>() + copy * stride,
                          .y = y.as<void>(),
                          .y_stride = problem.n,
                          .m = problem.m,
                          .workspace = workspace.as<void>()},
                         {.stream = stream});
    });
  }

  /// Microseconds that all multiprocessors together take for a step of one precision.
  struct StepCosts {
    double int8 = 0.0, bf16 = 0.0;
  };
  Result<StepCosts> step_costs(const MixedProblem& problem, const MixedTile& tile) {
    const auto key = std::make_tuple(problem.k, problem.m, tile.tokens, tile.row_blocks);
    if (const auto known = costs_.find(key); known != costs_.end()) {
      return known->second;
    }
    const int workers = device_.sms * tile.launched;
    const int token_tiles = ceil_div(problem.m, tile.tokens);
    const int row_tiles = workers / std::gcd(workers, token_tiles);
    StepCosts costs;
    for (const bool bf16 : {false, true}) {
      const int blocks = problem.k / 128;
      const MixedProblem even{.n = row_tiles * tile.row_blocks * 64,
                              .k = problem.k,
                              .m = problem.m,
                              .bf16 = PrecisionMap(static_cast<size_t>(blocks), bf16)};
      const size_t copies = timer_.copies_of(static_cast<size_t>(even.n) * even.k / 2);
      NIBBLE_ASSIGN_OR_RETURN(const MixedData data, MixedData::make(even, copies, timer_.stream()));
      NIBBLE_ASSIGN_OR_RETURN(
          const double us,
          timer_.time_mixed(data, copies, tile, MixedSchedule::kDecomposed, blocks));
      (bf16 ? costs.bf16 : costs.int8) =
          us / (static_cast<double>(row_tiles) * token_tiles * blocks * (bf16 ? 2 : 1));
    }
    costs_.emplace(key, costs);
    return costs;
  }

  /// The full form's tile that is fastest by the full schedule.
  Result<MixedTile> choose_tile(const MixedData& data, size_t copies) {
    std::optional<MixedTile> best;
    double least = 0.0;
    for (const MixedTile& tile : mixed_tiles()) {
      const int m = data.problem().m;
      if (tile.form != MixedForm::kFull || !suits(tile, m)) {
        continue;
      }
      NIBBLE_ASSIGN_OR_RETURN(
          const double us,
          timer_.time_mixed(data, copies, tile, MixedSchedule::kDecomposed,
                            choose_unit_blocks(data.problem(), tile, device_.sms)));
      if (!best || us < least) {
        best = tile;
        least = us;
      }
    }
    if (!best) {
      return make_error(StatusCode::kCorrupt, "no tile for {} tokens", data.problem().m);
    }
    return *best;
  }

  Status measure(const ScheduleShape& shape, int m) {
    MixedProblem problem{.n = shape.n,
                         .k = shape.k,
                         .m = m,
                         .bf16 = last_blocks(shape.k / 128, options_.bf16_percent)};
    const size_t copies = timer_.copies_of(static_cast<size_t>(shape.n) * shape.k / 2);
    Point point{shape, m};
    NIBBLE_ASSIGN_OR_RETURN(point.w4a16,
                            time_entry(kGemmW4A16ChannelSm90, ActFormat::kBf16, problem));
    NIBBLE_ASSIGN_OR_RETURN(const double w4a8,
                            time_entry(kGemmW4A8Sm90, ActFormat::kInt8Token, problem));
    report(point, "product_w4a16", point.w4a16);
    report(point, "product_w4a8", w4a8);
    MixedTile tile;
    int unit_blocks = 0;
    {
      NIBBLE_ASSIGN_OR_RETURN(const MixedData data,
                              MixedData::make(problem, copies, timer_.stream()));
      NIBBLE_ASSIGN_OR_RETURN(tile, choose_tile(data, copies));
      unit_blocks = choose_unit_blocks(problem, tile, device_.sms);
      NIBBLE_ASSIGN_OR_RETURN(const StepCosts costs, step_costs(problem, tile));
      const MixedTiles tiles = mixed_tiles_of(problem, tile, unit_blocks);
      point.tile = fmt::format("{}x{}", 64 * tile.row_blocks, tile.tokens);
      point.optimum =
          tiles.tiles() * (tiles.int8_steps * costs.int8 + tiles.bf16_steps * costs.bf16);
      for (const Variant& variant : kVariants) {
        NIBBLE_ASSIGN_OR_RETURN(const MixedTile own, form_of(tile, variant.form));
        NIBBLE_ASSIGN_OR_RETURN(
            const double us, timer_.time_mixed(data, copies, own, variant.schedule, unit_blocks));
        report(point, variant.name, us);
      }
    }
    point.optimum = 0.0;
    for (const bool bf16 : {false, true}) {
      problem.bf16.assign(problem.bf16.size(), bf16);
      NIBBLE_ASSIGN_OR_RETURN(const MixedData data,
                              MixedData::make(problem, copies, timer_.stream()));
      NIBBLE_ASSIGN_OR_RETURN(
          const double us,
          timer_.time_mixed(data, copies, tile, MixedSchedule::kDecomposed, unit_blocks));
      report(point, bf16 ? "all_bf16" : "all_int8", us);
    }
    return {};
  }

  static Result<MixedTile> form_of(const MixedTile& tile, MixedForm form) {
    for (const MixedTile& other : mixed_tiles()) {
      if (other.form == form && other.tokens == tile.tokens &&
          other.row_blocks == tile.row_blocks) {
        return other;
      }
    }
    return make_error(StatusCode::kCorrupt, "a form lacks a tile");
  }

  struct Point {
    ScheduleShape shape;
    int m = 0;
    double w4a16 = 0.0;
    double optimum = 0.0;  // 0: there is none
    std::string tile;
  };
  void report(const Point& point, std::string_view variant, double us) {
    const double tops = 2e-6 * point.shape.n * point.shape.k * point.m / us;
    const std::string name = point.shape.name.empty()
                                 ? fmt::format("{}x{}", point.shape.n, point.shape.k)
                                 : point.shape.name;
    std::printf("%-12s %5d %-26s %8s %10.2f %8.1f %8.3f %8.3f\n", name.c_str(), point.m,
                std::string(variant).c_str(), point.tile.c_str(), us, tops, point.w4a16 / us,
                point.optimum / us);
    std::fflush(stdout);
    std::vector<JsonObject::Member> row{{"shape", name},      {"m", point.m},
                                        {"n", point.shape.n}, {"k", point.shape.k},
                                        {"variant", variant}, {"tile", point.tile},
                                        {"us", us},           {"vs_w4a16", point.w4a16 / us}};
    if (point.optimum > 0.0) {
      row.emplace_back("of_optimum", point.optimum / us);
    }
    rows_.push_back(Json::object(std::move(row)));
  }

  const DeviceInfo& device_;
  const ScheduleBenchOptions& options_;
  MixedTimer timer_;
  std::map<std::tuple<int, int, int, int>, StepCosts> costs_;
  JsonArray rows_;
};

}  // namespace

Result<Json> bench_schedules(const DeviceInfo& device, const ScheduleBenchOptions& options) {
  return Bench(device, options).run();
}

}  // namespace nibble::cuda
