// w4ax_schedules: what schedules of tiles are worth to a product whose K blocks differ in the
// precision of activations (INT4 weights; INT8 or BF16), on the first GPU.
//   w4ax_schedules [--check 1] [--acts4 1] [--shape 4096x14336,..] [--m 16,..] [--bf16 25]
//   [--replays 5]
//                  [--json FILE]
// --check 1 compares every schedule and form with double precision and with each other, bit for
// bit, over odd shapes, and times nothing. --acts4 1 times something else: activations of 4 bits
// stored in bytes and two a byte, in products and in the kernel that writes them. --bf16: percent
// of the K blocks.

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "bench/cuda/schedules/act_bench.h"
#include "bench/cuda/schedules/schedule_bench.h"
#include "bench/cuda/schedules/schedule_check.h"

namespace nibble::cuda {
namespace {

Result<std::vector<int>> numbers(std::string_view text) {
  std::vector<int> values(1, 0);
  bool digits = false;
  for (const char c : text) {
    if (c >= '0' && c <= '9' && values.back() < 100000000) {
      values.back() = 10 * values.back() + (c - '0');
      digits = true;
    } else if ((c == ',' || c == 'x') && digits) {
      values.push_back(0);
      digits = false;
    } else {
      return make_error(StatusCode::kInvalidArgument, "\"{}\" is not a list of numbers", text);
    }
  }
  if (!digits) {
    return make_error(StatusCode::kInvalidArgument, "\"{}\" is not a list of numbers", text);
  }
  return values;
}

/// Kernels of INT8 activations sum 16 times the weight in 32 bits.
constexpr int kMostK = 131008;

Status set_shapes(const std::vector<int>& sizes, std::vector<ScheduleShape>& shapes) {
  shapes.clear();
  for (size_t i = 0; i + 1 < sizes.size(); i += 2) {
    shapes.push_back({std::string(), sizes[i], sizes[i + 1]});
    if (sizes[i] < 1 || sizes[i + 1] < 128 || sizes[i + 1] % 128 != 0 || sizes[i + 1] > kMostK) {
      return make_error(StatusCode::kInvalidArgument,
                        "--shape {}x{}: K has to be a multiple of 128, up to {}", sizes[i],
                        sizes[i + 1], kMostK);
    }
  }
  return {};
}

struct Options {
  bool check = false, acts4 = false;
  std::string json;
  ScheduleBenchOptions bench;
};

Result<Options> parse(int argc, char** argv) {
  Options options;
  if (argc % 2 == 0) {
    return make_error(StatusCode::kInvalidArgument, "every flag takes one value");
  }
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (flag == "--json") {
      options.json = argv[i + 1];
      continue;
    }
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<int> values, numbers(argv[i + 1]));
    if (flag == "--check") {
      options.check = values[0] != 0;
    } else if (flag == "--acts4") {
      options.acts4 = values[0] != 0;
    } else if (flag == "--m" && *std::min_element(values.begin(), values.end()) > 0) {
      options.bench.row_counts = values;
    } else if (flag == "--bf16" && values[0] <= 100) {
      options.bench.bf16_percent = values[0];
    } else if (flag == "--replays" && values[0] > 0) {
      options.bench.replays = values[0];
    } else if (flag == "--shape" && values.size() % 2 == 0) {
      NIBBLE_RETURN_IF_ERROR(set_shapes(values, options.bench.shapes));
    } else {
      return make_error(StatusCode::kInvalidArgument, "{} {} is no flag and value of this program",
                        flag, argv[i + 1]);
    }
  }
  return options;
}

Status run(int argc, char** argv) {
  NIBBLE_ASSIGN_OR_RETURN(const Options options, parse(argc, argv));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceInfo device, query_device(0));
  if (!device.hopper()) {
    return make_error(StatusCode::kUnavailable, "{} is no Hopper GPU, for which this kernel is",
                      device.name);
  }
  if (options.check) {
    return check_schedules(device);
  }
  NIBBLE_ASSIGN_OR_RETURN(const Json report, options.acts4
                                                 ? bench_act_stores(device, options.bench)
                                                 : bench_schedules(device, options.bench));
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << report.dump() << "\n";
    if (!file.flush()) {
      return make_error(StatusCode::kUnavailable, "{} cannot be written", options.json);
    }
  }
  return {};
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) {
  const nibble::Status status = nibble::cuda::run(argc, argv);
  if (!status.ok()) {
    std::fprintf(stderr, "w4ax_schedules: %s\n", status.message().c_str());
  }
  return nibble::exit_code(status.code());
}
