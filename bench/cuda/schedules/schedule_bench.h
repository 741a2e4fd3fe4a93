#pragma once

#include <string>
#include <vector>

#include "backend/cuda/device_info.h"
#include "base/json.h"
#include "base/status.h"

namespace nibble::cuda {

struct ScheduleShape {
  std::string name;
  int n = 0, k = 0;
};

struct ScheduleBenchOptions {
  std::vector<ScheduleShape> shapes{{"8b qkv", 6144, 4096},       {"8b o", 4096, 4096},
                                    {"8b gate+up", 28672, 4096},  {"8b down", 4096, 14336},
                                    {"70b qkv", 10240, 8192},     {"70b o", 8192, 8192},
                                    {"70b gate+up", 57344, 8192}, {"70b down", 8192, 28672}};
  std::vector<int> row_counts{16, 64, 256, 1024, 4096};
  int bf16_percent = 25;  // of the K blocks
  int replays = 5;
};

/// Times every schedule and form of the kernel, the same kernel over maps of one precision, and the
/// products of the program for W4A8 and W4A16, each in a recorded chain of launches over copies of
/// the weights that the L2 cache does not hold. The tile is that which is fastest by the full
/// schedule. Prints a table; returns {"schedules": [{"shape", "m", "n", "k", "tile", "variant",
/// "us", "vs_w4a16", "of_optimum"}]}. The optimum is the cost of all steps over all
/// multiprocessors; a step of each precision costs what it does in a product of the same k and m
/// whose tiles fill the multiprocessors evenly and that knows this precision alone.
Result<Json> bench_schedules(const DeviceInfo& device, const ScheduleBenchOptions& options);

}  // namespace nibble::cuda
