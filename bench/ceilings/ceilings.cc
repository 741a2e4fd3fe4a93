#include "bench/ceilings/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "backend/cpu/isa.h"
#include "bench/ceilings/ceiling_loops.h"
#include "core/buffer.h"

namespace nibble::cpu {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTimings = 7;
constexpr int64_t kReadBytes = int64_t{1} << 30;
constexpr int64_t kReadChunk = int64_t{4} << 20;  // of one thread's turn
constexpr double kPeakSeconds = 0.02;             // of one timing
constexpr int64_t kNearBytes = int64_t{512} << 20;
constexpr int64_t kNearReadBytes = int64_t{64} << 20;
constexpr double kNearSeconds = 0.002;

/// A ceiling is the best that the machine does: other work and its clock only lower a timing.
double best(const std::vector<double>& seconds) { return *std::ranges::min_element(seconds); }

template <typename Fn>
double seconds_of(const Fn& fn) {
  const auto begin = Clock::now();
  fn();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

constexpr int64_t kPlainReadAhead = 512;  // on Zen 3 a tenth faster than kReadAhead

/// For machines without 64-byte loads; the compiler takes what the baseline has.
uint64_t read_loop_plain(const std::byte* data, int64_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  uint64_t sums[16] = {};
  for (int64_t i = 0; i < bytes / 8; i += 16) {
    __builtin_prefetch(words + i + kPlainReadAhead / 8);
    __builtin_prefetch(words + i + kPlainReadAhead / 8 + 8);
    for (int64_t j = 0; j < 16; ++j) {
      sums[j] += words[i + j];
    }
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) {
    sum += part;
  }
  return sum;
}

struct PeakLoop {
  std::optional<double> Ceilings::*tops = nullptr;  // its ceiling
  void (*run)(int64_t turns) = nullptr;
  int64_t ops = 0;  // of a turn
};

constexpr PeakLoop kFma256{&Ceilings::fma256_tops, fma256_loop, kFma256Ops};
constexpr PeakLoop kFma512{&Ceilings::fma512_tops, fma512_loop, kFma512Ops};
constexpr PeakLoop kVnni256{&Ceilings::vnni256_tops, vnni256_loop, kVnni256Ops};
constexpr PeakLoop kVnni512{&Ceilings::vnni512_tops, vnni512_loop, kVnni512Ops};
constexpr PeakLoop kAmxInt8{&Ceilings::amx_int8_tops, amx_int8_loop, kAmxInt8Ops};
constexpr PeakLoop kAmxBf16{&Ceilings::amx_bf16_tops, amx_bf16_loop, kAmxBf16Ops};

/// 1e12 operations a second of a loop that every thread runs at once: the best of some timings.
double peak(ThreadPool& pool, const PeakLoop& loop, double seconds_each, int timings) {
  const auto run = [&](int64_t turns) {
    return seconds_of(
        [&] { pool.parallel_for(pool.threads(), [&](int64_t, int) { loop.run(turns); }); });
  };
  int64_t turns = 1024;
  while (run(turns) < seconds_each / 4) {
    turns *= 2;
  }
  turns *= 4;
  std::vector<double> seconds(static_cast<size_t>(timings));
  std::ranges::generate(seconds, [&] { return run(turns); });
  return static_cast<double>(loop.ops * turns * pool.threads()) / best(seconds) * 1e-12;
}

/// What bounds kernels of an instruction set with such activations, or none.
const PeakLoop* loop_of(std::string_view isa, ActFormat act) {
  const bool integer = is_integer(act);
  if (isa == "amx") {
    return integer ? &kAmxInt8 : &kAmxBf16;
  }
  if (isa == "avx512") {
    return integer ? &kVnni512 : &kFma512;
  }
  if (isa == "avx512_bw") {
    return &kFma512;
  }
  if (isa == "avx2_vnni") {
    return integer ? &kVnni256 : &kFma256;
  }
  return isa == "avx2" ? &kFma256 : nullptr;
}

/// Seconds in which all threads together read some memory.
double read_seconds(ThreadPool& pool, const std::byte* memory, int64_t bytes) {
  const auto read = detect_cpu_features().avx512 ? read_loop_avx512 : read_loop_plain;
  const int64_t chunks = bytes / kReadChunk;
  std::vector<uint64_t> sums(static_cast<size_t>(chunks));
  const double seconds = seconds_of([&] {
    pool.parallel_for(chunks, [&](int64_t chunk, int) {
      sums[static_cast<size_t>(chunk)] = read(memory + chunk * kReadChunk, kReadChunk);
    });
  });
  CHECK(std::ranges::all_of(sums, [](uint64_t sum) { return sum != 0; }));
  return seconds;
}

/// Memory that each thread of the pool touched a part of.
Result<Buffer> touched_memory(ThreadPool& pool, int64_t bytes) {
  NIBBLE_ASSIGN_OR_RETURN(Buffer memory, Buffer::allocate(static_cast<size_t>(bytes)));
  pool.parallel_for(bytes / kReadChunk, [&](int64_t chunk, int) {
    std::memset(memory.data() + chunk * kReadChunk, 1, kReadChunk);
  });
  return memory;
}

}  // namespace

std::optional<double> Ceilings::peak_tops(std::string_view isa, ActFormat act) const {
  const PeakLoop* loop = loop_of(isa, act);
  return loop != nullptr ? this->*loop->tops : std::nullopt;
}

Result<NearCeilings> NearCeilings::create(ThreadPool& pool) {
  NIBBLE_ASSIGN_OR_RETURN(Buffer memory, touched_memory(pool, kNearBytes));
  return NearCeilings(pool, std::move(memory));
}

double NearCeilings::read_gbps() {
  const double seconds = read_seconds(*pool_, memory_.data() + next_, kNearReadBytes);
  next_ = (next_ + kNearReadBytes) % kNearBytes;
  return static_cast<double>(kNearReadBytes) / seconds * 1e-9;
}

std::optional<double> NearCeilings::peak_tops(std::string_view isa, ActFormat act) {
  const PeakLoop* loop = loop_of(isa, act);
  return loop != nullptr ? std::optional(peak(*pool_, *loop, kNearSeconds, 1)) : std::nullopt;
}

std::optional<double> measure_peak_tops(ThreadPool& pool, std::string_view isa, ActFormat act) {
  const PeakLoop* loop = loop_of(isa, act);
  return loop != nullptr ? std::optional(peak(pool, *loop, kPeakSeconds, 1)) : std::nullopt;
}

Result<double> measure_read_gbps(ThreadPool& pool) {
  NIBBLE_ASSIGN_OR_RETURN(const Buffer memory, touched_memory(pool, kReadBytes));
  std::vector<double> seconds(kTimings);
  std::ranges::generate(seconds, [&] { return read_seconds(pool, memory.data(), kReadBytes); });
  return static_cast<double>(kReadBytes) / best(seconds) * 1e-9;
}

Result<Ceilings> measure_ceilings(ThreadPool& pool) {
  const CpuFeatures features = detect_cpu_features();
  Ceilings out;
  NIBBLE_ASSIGN_OR_RETURN(out.read_gbps, measure_read_gbps(pool));
  const auto measure = [&](bool runs, const PeakLoop& loop) {
    if (runs) {
      out.*loop.tops = peak(pool, loop, kPeakSeconds, kTimings);
    }
  };
  measure(features.avx2, kFma256);
  measure(features.avx2_vnni, kVnni256);
  measure(features.avx512, kFma512);
  measure(features.avx512_vnni, kVnni512);
  measure(features.amx, kAmxInt8);
  measure(features.amx, kAmxBf16);
  return out;
}

}  // namespace nibble::cpu
