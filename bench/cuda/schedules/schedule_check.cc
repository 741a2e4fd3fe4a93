#include "bench/cuda/schedules/schedule_check.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "bench/cuda/schedules/act_rows.h"
#include "bench/cuda/schedules/mixed_data.h"

namespace nibble::cuda {
namespace {

struct Expected {
  std::vector<double> y, size;
};

template <typename T>
Result<std::vector<T>> read_back(const void* from, size_t count) {
  std::vector<T> values(count);
  NIBBLE_RETURN_IF_ERROR(
      check(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost),
            "reading results"));
  return values;
}

Result<Expected> expect(const MixedData& data, cudaStream_t stream) {
  const auto count = static_cast<size_t>(data.problem().m) * static_cast<size_t>(data.problem().n);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory y, DeviceMemory::allocate(count * 8));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory size, DeviceMemory::allocate(count * 8));
  NIBBLE_RETURN_IF_ERROR(
      check(reference_mixed(data.reference(y.as<double>(), size.as<double>()), stream),
            "computing in double precision"));
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "computing in double precision"));
  Expected expected;
  NIBBLE_ASSIGN_OR_RETURN(expected.y, read_back<double>(y.as<void>(), count));
  NIBBLE_ASSIGN_OR_RETURN(expected.size, read_back<double>(size.as<void>(), count));
  return expected;
}

/// Runs twice over poisoned memory: what the first run left of counters must serve the second.
Result<std::vector<uint16_t>> run_twice(const MixedProduct& product,
                                        const MixedOperands& operands,
                                        size_t count,
                                        cudaStream_t stream) {
  std::vector<uint16_t> first;
  for (int i = 0; i < 2; ++i) {
    NIBBLE_RETURN_IF_ERROR(
        check(cudaMemsetAsync(operands.y, 0xff, count * 2, stream), "poisoning"));
    NIBBLE_RETURN_IF_ERROR(
        check(product.run(operands, {.stream = stream, .overlap = false}), "launching"));
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream), "running a product"));
    NIBBLE_ASSIGN_OR_RETURN(std::vector<uint16_t> y, read_back<uint16_t>(operands.y, count));
    if (i == 1 && y != first) {
      return make_error(StatusCode::kCorrupt, "two runs differ");
    }
    first = std::move(y);
  }
  return first;
}

/// BF16's rounding, and that of sums in F32 by the size of their parts.
Status compare(const std::vector<uint16_t>& y, const Expected& expected) {
  for (size_t i = 0; i < y.size(); ++i) {
    const double value = std::bit_cast<float>(static_cast<uint32_t>(y[i]) << 16);
    const double bound = std::abs(expected.y[i]) / 256.0 + expected.size[i] * 0x1p-16;
    if (!(std::abs(value - expected.y[i]) <= bound)) {
      return make_error(StatusCode::kCorrupt, "result {} is {}, not {}", i, value, expected.y[i]);
    }
  }
  return {};
}

/// Of activations of 8 bits, those of every form that takes them; of 4 bits, of both ways to store
/// them.
std::vector<MixedTile> tiles_for(const MixedProblem& problem) {
  std::vector<MixedTile> tiles = mixed_tiles();
  std::erase_if(tiles, [&](const MixedTile& tile) {
    return !takes(tile, problem) || (problem.act_bits == 4 && tile.form != MixedForm::kFull &&
                                     tile.form != MixedForm::kNibbles);
  });
  return tiles;
}

class Check final {
 public:
  Check(const DeviceInfo& device, cudaStream_t stream) : device_(device), stream_(stream) {}

  Status run(const MixedProblem& problem) {
    NIBBLE_ASSIGN_OR_RETURN(const MixedData data, MixedData::make(problem, 1, stream_));
    NIBBLE_ASSIGN_OR_RETURN(const Expected expected, expect(data, stream_));
    for (const int unit_blocks : {1, 2, problem.k / 128}) {
      std::vector<uint16_t> same;
      int runs = 0;
      for (const MixedTile& tile : tiles_for(problem)) {
        for (const auto schedule :
             {MixedSchedule::kLockStep, MixedSchedule::kRoundRobin, MixedSchedule::kBalanced,
              MixedSchedule::kRemapped, MixedSchedule::kDecomposed}) {
          const std::string what = fmt::format(
              "n {} k {} m {} with {} BF16 blocks and {} bits, tile of {} x {}, form {}, schedule "
              "{}, units of {}",
              problem.n, problem.k, problem.m, problem.bf16_blocks(), problem.act_bits,
              64 * tile.row_blocks, tile.tokens, static_cast<int>(tile.form),
              static_cast<int>(schedule), unit_blocks);
          NIBBLE_ASSIGN_OR_RETURN(const auto product, MixedProduct::make(problem, tile, schedule,
                                                                         unit_blocks, device_));
          auto y = run_twice(*product, data.operands(order_of(tile.form), 0), expected.y.size(),
                             stream_);
          if (!y.ok()) {
            return y.status().with_context(what);
          }
          if (Status right = compare(*y, expected); !right.ok()) {
            return right.with_context(what);
          }
          if (same.empty()) {
            same = *y;
          } else if (*y != same) {
            return make_error(StatusCode::kCorrupt, "{}: other bits than the first", what);
          }
          ++runs;
        }
      }
      std::printf(
          "n %5d k %5d m %4d, %2d of %3d blocks BF16, others of %d bits, units of %2d: %d runs, "
          "same bits\n",
          problem.n, problem.k, problem.m, problem.bf16_blocks(), problem.k / 128, problem.act_bits,
          unit_blocks, runs);
      std::fflush(stdout);
    }
    return {};
  }

 private:
  const DeviceInfo& device_;
  cudaStream_t stream_;
};

/// A map of `blocks` in which every third, all or none are BF16.
PrecisionMap map_of(int blocks, int every) {
  PrecisionMap map(static_cast<size_t>(blocks), false);
  for (size_t b = 0; every > 0 && b < map.size(); ++b) {
    map[b] = b % static_cast<size_t>(every) == 0;
  }
  return map;
}

}  // namespace

Status check_schedules(const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(const auto timer, Timer::make());
  Check check(device, timer->stream());
  struct Shape {
    int n, k, m, every;
  };
  for (const Shape& shape :
       {Shape{200, 1152, 1, 3}, Shape{64, 128, 3, 1}, Shape{1000, 2048, 17, 4},
        Shape{4096, 1024, 65, 2}, Shape{328, 1152, 130, 0}, Shape{6200, 640, 257, 3}}) {
    MixedProblem problem{
        .n = shape.n, .k = shape.k, .m = shape.m, .bf16 = map_of(shape.k / 128, shape.every)};
    for (const int bits : {8, 4}) {
      problem.act_bits = bits;
      NIBBLE_RETURN_IF_ERROR(check.run(problem));
    }
  }
  return check_act_rows(timer->stream());
}

}  // namespace nibble::cuda
