#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nibble {

/// One logical CPU that this process may use.
struct Cpu {
  int id = 0;
  int node = 0;     // NUMA node
  int sibling = 0;  // 0: the first CPU of its core, 1: its second hardware thread, ...

  constexpr bool operator==(const Cpu&) const = default;
};

/// What the system lets this process compute on.
struct CpuTopology {
  std::vector<Cpu> cpus;  // ascending by node, then sibling, then id; never empty
  int quota = 0;          // whole CPUs' worth of time that control groups grant; 0: no limit

  /// Threads that can run at the same time: CPUs, or the quota if that is less; at least 1.
  [[nodiscard]] int usable_cpus() const;
  /// The same, counting a core with several hardware threads once.
  [[nodiscard]] int usable_cores() const;
};

/// CPUs of the calling thread's affinity mask, ascending; {0} when it cannot be read.
[[nodiscard]] std::vector<int> allowed_cpus();
/// Reads the affinity mask of the calling thread, and nodes, cores and quotas from the system's
/// files below `root`. What cannot be read counts as one node, one thread per core, no limit.
[[nodiscard]] CpuTopology read_cpu_topology(const std::string& root = "");
/// Cores that this process may use, at least 1: the number of threads when none is asked for.
[[nodiscard]] int usable_cores();
/// The numbers in a list as the system writes it, "0-3,8,10-11"; empty for anything else.
[[nodiscard]] std::vector<int> parse_cpu_list(std::string_view text);

enum class Pinning : uint8_t { kOff, kCores };
enum class NumaMode : uint8_t { kOff, kAuto };

struct ThreadOptions {
  int threads = 0;  // 0: one per usable core
  Pinning pinning = Pinning::kOff;
  NumaMode numa = NumaMode::kAuto;
};

/// Where the threads of a pool run.
struct ThreadPlan {
  /// For each thread the CPUs that it is held to; empty: the system chooses.
  std::vector<std::vector<int>> places;

  [[nodiscard]] int threads() const { return static_cast<int>(places.size()); }
};

/// Threads with neighbouring numbers share a node, every node gets a share in proportion to its
/// CPUs. kAuto holds threads to their node where there are several; kCores holds each to one CPU,
/// different cores first.
[[nodiscard]] ThreadPlan plan_threads(const CpuTopology& topology, const ThreadOptions& options);

/// Holds the calling thread to these CPUs, less one. A refusal of the system is not an error: the
/// thread then runs anywhere.
void hold_to_cpus(const std::vector<int>& cpus, int except = -1);

}  // namespace nibble
