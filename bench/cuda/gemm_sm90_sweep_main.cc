// gemm_sm90_sweep: times the tiles and schedules of the Hopper products of one scheme and shape on
// the first GPU, and compares their results bit for bit.
//   gemm_sm90_sweep --scheme w4a8 --shape 4096x14336 --m 1,16 [--tile 0,1] [--cluster 2,4]
//                   [--parts 1,3] [--runs 0] [--blocks 1] [--turn 0,2] [--replays 9] [--rounds 1]
//                   [--rest 0]
// Each m runs the product's own choice (marked *), then, for every tile (all that are not mostly
// empty): clusters of these sizes, tiles cut into these numbers of parts (0: all into runs of equal
// length) and, with --runs 1, the last ones into runs, on so many blocks of a multiprocessor; own
// rows take so many steps more (turn) than others' where blocks send each other sums. After each
// replay of a graph the GPU rests `rest` times as long. The last figure is the own choice's time
// over a line's.

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"
#include "bench/cuda/bench_data.h"
#include "bench/cuda/bench_timer.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble::cuda {
namespace {

using Lists = std::map<std::string, std::vector<int64_t>, std::less<>>;

struct Options {
  std::string scheme;
  Lists lists{{"m", {1}},    {"tile", {}},  {"cluster", {2, 4}}, {"parts", {1}},
              {"shape", {}}, {"turn", {0}}, {"replays", {9}},    {"rounds", {1}},
              {"runs", {0}}, {"rest", {0}}, {"blocks", {1}}};
};

Result<std::vector<int64_t>> numbers(std::string_view text) {
  std::vector<int64_t> values;
  while (!text.empty()) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0) {
      return make_error(StatusCode::kInvalidArgument, "\"{}\" is not a list of numbers", text);
    }
    values.push_back(value);
    text.remove_prefix(
        std::min(text.size(), static_cast<size_t>(end - text.data()) + 1));  // ',' or 'x'
  }
  return values;
}

Result<Options> parse(int argc, char** argv) {
  Options options;
  if (argc % 2 == 0) {
    return make_error(StatusCode::kInvalidArgument, "every flag takes one value");
  }
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    const auto list = options.lists.find(flag.substr(std::min<size_t>(2, flag.size())));
    if (flag == "--scheme") {
      options.scheme = argv[i + 1];
    } else if (flag.substr(0, 2) == "--" && list != options.lists.end()) {
      NIBBLE_ASSIGN_OR_RETURN(list->second, numbers(argv[i + 1]));
    } else {
      return make_error(StatusCode::kInvalidArgument, "unknown flag {}", flag);
    }
  }
  if (options.scheme.empty() || options.lists["shape"].size() != 2) {
    return make_error(StatusCode::kInvalidArgument, "--scheme or --shape NxK is missing");
  }
  return options;
}

/// The scheme's product for Hopper, or none.
Result<std::unique_ptr<GemmKernel>> make_kernel(const GemmProblem& problem,
                                                const DeviceInfo& device) {
  if (problem.weight.scale_per == ScalePer::kGroup && problem.act == ActFormat::kBf16) {
    return make_w4a16_wide(problem, device);
  }
  for (const GemmEntry& entry : gemm_entries()) {
    if (entry.accepts(problem, device)) {
      NIBBLE_ASSIGN_OR_RETURN(auto kernel, entry.make(problem, device));
      if (dynamic_cast<const GemmSm90*>(kernel.get()) != nullptr) {
        return kernel;
      }
    }
  }
  return make_error(StatusCode::kInvalidArgument, "no such product for Hopper");
}

class Sweep final {
 public:
  Status run(Options options) {
    options_ = std::move(options);
    NIBBLE_RETURN_IF_ERROR(prepare());
    for (const int64_t m : options_.lists["m"]) {
      expected_.clear();
      const int own = gemm_->choose(m);
      NIBBLE_RETURN_IF_ERROR(measure(m, own, gemm_->schedule(own, m), '*'));
      for (int tile = 0; tile < static_cast<int>(gemm_->tiles().size()); ++tile) {
        const auto& wanted = options_.lists["tile"];
        const int tokens = gemm_->tiles()[static_cast<size_t>(tile)].tokens;
        const bool listed = std::find(wanted.begin(), wanted.end(), tile) != wanted.end();
        if (wanted.empty() ? tokens <= 2 * std::max<int64_t>(m, 4) && 4 * tokens >= m : listed) {
          NIBBLE_RETURN_IF_ERROR(measure_tile(m, tile));
        }
      }
    }
    return {};
  }

 private:
  Status prepare() {
    NIBBLE_ASSIGN_OR_RETURN(device_, query_device(0));
    NIBBLE_ASSIGN_OR_RETURN(timer_, Timer::make());
    NIBBLE_ASSIGN_OR_RETURN(QuantScheme scheme, find_scheme(options_.scheme));
    scheme.act = scheme.act == ActFormat::kFloat ? ActFormat::kBf16 : scheme.act;
    n_ = options_.lists["shape"][0];
    k_ = options_.lists["shape"][1];
    NIBBLE_ASSIGN_OR_RETURN(
        kernel_,
        make_kernel({.weight = scheme.weight, .act = scheme.act, .n = n_, .k = k_}, device_));
    gemm_ = dynamic_cast<const GemmSm90*>(kernel_.get());
    const auto& m = options_.lists["m"];
    max_m_ = *std::max_element(m.begin(), m.end());
    stride_ = (kernel_->packed_bytes() + 1023) / 1024 * 1024;
    copies_ = std::max<size_t>(2, 3 * static_cast<size_t>(device_.l2_bytes) / stride_ + 1);
    const auto rows = static_cast<size_t>(max_m_);
    NIBBLE_ASSIGN_OR_RETURN(packed_, DeviceMemory::allocate(stride_ * copies_));
    NIBBLE_ASSIGN_OR_RETURN(x_, DeviceMemory::allocate(rows * static_cast<size_t>(k_) * 2));
    NIBBLE_ASSIGN_OR_RETURN(x_scales_, DeviceMemory::allocate(rows * 4));
    NIBBLE_ASSIGN_OR_RETURN(y_, DeviceMemory::allocate(rows * static_cast<size_t>(n_) * 2));
    NIBBLE_ASSIGN_OR_RETURN(workspace_, DeviceMemory::allocate(size_t{256} << 20));
    cudaStream_t stream = timer_->stream();
    const WeightFormat& weight = scheme.weight;
    const auto code_bytes = static_cast<size_t>(n_ * QuantTensor::code_row_bytes(weight.code, k_));
    const bool grouped = weight.scale_per == ScalePer::kGroup;
    const auto scales = static_cast<size_t>(n_ * (grouped ? k_ / weight.group_size : 1));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory codes, DeviceMemory::allocate(code_bytes));
    NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory values, DeviceMemory::allocate(scales * 4));
    NIBBLE_RETURN_IF_ERROR(check(random_codes(weight.code, codes.as<void>(), code_bytes, 1, stream),
                                 "filling weights"));
    NIBBLE_RETURN_IF_ERROR(
        check(random_scales(values.as<float>(), scales, false, 2, stream), "filling scales"));
    for (size_t copy = 0; copy < copies_; ++copy) {
      NIBBLE_RETURN_IF_ERROR(check(kernel_->pack(codes.as<void>(), values.as<float>(),
                                                 packed_.as<uint8_t>() + copy * stride_, stream),
                                   "packing weights"));
    }
    NIBBLE_RETURN_IF_ERROR(check(
        random_activations(scheme.act, x_.as<void>(), rows * static_cast<size_t>(k_), 3, stream),
        "filling activations"));
    NIBBLE_RETURN_IF_ERROR(
        check(random_scales(x_scales_.as<float>(), rows, false, 4, stream), "filling scales"));
    return timer_->wait();
  }

  Status measure_tile(int64_t m, int index) {
    const GemmSm90Tile& tile = gemm_->tiles()[static_cast<size_t>(index)];
    const GemmSchedule own = gemm_->schedule(index, m);
    if (tile.pairs) {
      return measure_pairs(m, index, own);
    }
    const int tiles = own.row_tiles * own.token_tiles;
    for (const int64_t size : options_.lists["cluster"]) {
      const int cluster = static_cast<int>(size);
      if (tile.clusters && cluster <= own.steps && tiles * cluster <= device_.sms * tile.resident) {
        NIBBLE_RETURN_IF_ERROR(measure(
            m, index, make_cluster_schedule(own.row_tiles, own.token_tiles, own.steps, cluster),
            ' '));
      }
    }
    for (const int64_t count : options_.lists["blocks"]) {
      if (count <= tile.resident) {
        NIBBLE_RETURN_IF_ERROR(measure_split(
            m, index, own,
            device_.sms * std::max(static_cast<int>(count), tile.launched) / tile.cluster));
      }
    }
    return {};
  }

  Status measure_split(int64_t m, int index, const GemmSchedule& own, int blocks) {
    const int tiles = own.row_tiles * own.token_tiles;
    if (options_.lists["runs"].front() != 0 && tiles % blocks != 0) {
      NIBBLE_RETURN_IF_ERROR(measure(
          m, index, make_runs_schedule(own.row_tiles, own.token_tiles, own.steps, blocks), ' '));
    }
    for (const int64_t wanted : options_.lists["parts"]) {
      const int parts = static_cast<int>(wanted);
      GemmSchedule schedule = make_parts_schedule(own.row_tiles, own.token_tiles, own.steps, blocks,
                                                  std::max(1, parts));
      if (parts == 0) {  // all tiles in runs of equal length
        schedule.whole_tiles = 0;
        schedule.split_tiles = tiles;
        schedule.blocks = schedule.split_blocks = std::min(blocks, tiles * own.steps);
      }
      const int room = tiles > blocks ? blocks : 2 * blocks;
      if (parts <= 1 || (parts <= own.steps && tiles % blocks * parts <= room)) {
        NIBBLE_RETURN_IF_ERROR(measure(m, index, schedule, ' '));
      }
    }
    return {};
  }

  Status measure_pairs(int64_t m, int index, const GemmSchedule& own) {
    const int tiles = own.row_tiles * own.token_tiles;
    for (const int64_t part_count : options_.lists["parts"]) {
      const int parts = std::max<int>(2, static_cast<int>(part_count));
      if (tiles * parts > (parts > 2 ? 1 : 4) * device_.sms ||
          (parts > 2 && gemm_->tiles()[static_cast<size_t>(index)].row_blocks > 2)) {
        continue;
      }
      for (const int64_t beyond : options_.lists["turn"]) {
        const int lent = (own.steps - static_cast<int>(beyond)) / parts;
        NIBBLE_RETURN_IF_ERROR(
            measure(m, index,
                    make_pairs_schedule(own.row_tiles, own.token_tiles, own.steps,
                                        own.steps - lent * (parts - 1), parts),
                    ' '));
      }
    }
    return {};
  }

  cudaError_t launch_one(
      int64_t m, int tile, const GemmSchedule& schedule, size_t copy, cudaStream_t stream) {
    return gemm_->run_schedule(tile, schedule,
                               {.x = x_.as<void>(),
                                .x_scales = x_scales_.as<float>(),
                                .packed = packed_.as<uint8_t>() + copy * stride_,
                                .y = y_.as<void>(),
                                .y_stride = n_,
                                .m = m,
                                .workspace = workspace_.as<void>()},
                               {.stream = stream});
  }

  /// Runs once over poisoned memory and compares with the first result of this m.
  Result<std::string> compare(int64_t m, int tile, const GemmSchedule& schedule) {
    std::vector<uint16_t> y(static_cast<size_t>(m * n_));
    cudaStream_t stream = timer_->stream();
    NIBBLE_RETURN_IF_ERROR(
        check(cudaMemsetAsync(y_.as<void>(), 0xff, y.size() * 2, stream), "poisoning"));
    NIBBLE_RETURN_IF_ERROR(check(launch_one(m, tile, schedule, 0, stream), "launching"));
    NIBBLE_RETURN_IF_ERROR(timer_->wait());
    NIBBLE_RETURN_IF_ERROR(check(
        cudaMemcpy(y.data(), y_.as<void>(), y.size() * 2, cudaMemcpyDeviceToHost), "reading"));
    if (expected_.empty()) {
      expected_ = y;
    }
    const auto value = [](uint16_t bits) {
      return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
    };
    double squares = 0.0, norm = 0.0;
    for (size_t i = 0; i < y.size(); ++i) {
      const double expected = value(expected_[i]), off = value(y[i]) - expected;
      squares += off * off;
      norm += expected * expected;
    }
    return squares == 0.0 ? std::string("same")
                          : "off by " + std::to_string(std::sqrt(squares / norm));
  }

  Status measure(int64_t m, int tile, const GemmSchedule& schedule, char mark) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string same, compare(m, tile, schedule));
    const size_t launches = copies_ * static_cast<size_t>(options_.lists["rounds"].front());
    NIBBLE_ASSIGN_OR_RETURN(const Recording recording, timer_->record([&]() -> Status {
      for (size_t i = 0; i < launches; ++i) {
        NIBBLE_RETURN_IF_ERROR(
            check(launch_one(m, tile, schedule, i % copies_, timer_->stream()), "launching"));
      }
      return {};
    }));
    std::vector<double> us;
    for (int64_t replay = 0; replay <= options_.lists["replays"].front(); ++replay) {
      NIBBLE_ASSIGN_OR_RETURN(const double time, timer_->replay(recording));
      us.push_back(time / static_cast<double>(launches));
      std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(
          time * static_cast<double>(options_.lists["rest"].front())));
    }
    us.erase(us.begin());
    own_us_ = mark == '*' ? median(us) : own_us_;
    const GemmSm90Tile& t = gemm_->tiles()[static_cast<size_t>(tile)];
    const double bytes = static_cast<double>(kernel_->packed_bytes());
    std::printf(
        "%c %-9s %5ldx%-5ld m %4ld  tile %2d <%3d,%d,%d,r%d,c%d>  cluster %d split %3d of %3d "
        "blocks "
        "%3d  %8.2f us %5.2f TB/s  %5.3f  %s\n",
        mark, options_.scheme.c_str(), static_cast<long>(n_), static_cast<long>(k_),
        static_cast<long>(m), tile, t.tokens, t.row_blocks / t.cluster / 2, t.depth, t.resident,
        t.cluster, schedule.cluster, schedule.split_blocks,
        schedule.turn > 0 ? schedule.turn : schedule.split_tiles, schedule.blocks, median(us),
        bytes / median(us) * 1e-6, own_us_ / median(us), same.c_str());
    std::fflush(stdout);
    return {};
  }

  Options options_;
  DeviceInfo device_;
  std::unique_ptr<Timer> timer_;
  std::unique_ptr<GemmKernel> kernel_;
  const GemmSm90* gemm_ = nullptr;
  int64_t n_ = 0, k_ = 0, max_m_ = 0;
  size_t stride_ = 0, copies_ = 0;
  DeviceMemory packed_, x_, x_scales_, y_, workspace_;
  std::vector<uint16_t> expected_;
  double own_us_ = 0.0;  // of the own choice at this m
};

Status run(int argc, char** argv) {
  NIBBLE_ASSIGN_OR_RETURN(Options options, parse(argc, argv));
  return Sweep().run(std::move(options));
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) {
  const nibble::Status status = nibble::cuda::run(argc, argv);
  if (!status.ok()) {
    std::fprintf(stderr, "gemm_sm90_sweep: %s\n", status.message().c_str());
  }
  return nibble::exit_code(status.code());
}
