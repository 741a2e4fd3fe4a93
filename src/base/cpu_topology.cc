#include "base/cpu_topology.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <map>

#include <fmt/core.h>
#include <sched.h>

namespace nibble {
namespace {

constexpr int kMostCpus = 8192;  // the largest that Linux can be built for

using CpuMask = std::array<cpu_set_t, kMostCpus / CPU_SETSIZE>;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::map<int, int> nodes_of_cpus(const std::string& root) {
  std::map<int, int> nodes;
  const std::string folder = root + "/sys/devices/system/node";
  for (const int node : parse_cpu_list(first_line(folder + "/has_cpu"))) {
    for (const int cpu :
         parse_cpu_list(first_line(fmt::format("{}/node{}/cpulist", folder, node)))) {
      nodes[cpu] = node;
    }
  }
  return nodes;
}

/// Whole CPUs that `quota` microseconds per `period` amount to; 0: no limit.
int whole_cpus(const std::string& quota, const std::string& period) {
  int64_t used = 0;
  int64_t of = 0;
  const auto parse = [](const std::string& text, int64_t& value) {
    const char* end = text.data() + text.size();
    return std::from_chars(text.data(), end, value).ptr == end && value > 0;
  };
  if (!parse(quota, used) || !parse(period, of)) {
    return 0;  // "max", -1 or no such file
  }
  return static_cast<int>(std::clamp<int64_t>(used / of, 1, kMostCpus));
}

int quota_of_folder(const std::string& folder) {
  const std::string line = first_line(folder + "/cpu.max");  // version 2: "200000 100000"
  const size_t space = line.find(' ');
  if (space != std::string::npos) {
    return whole_cpus(line.substr(0, space), line.substr(space + 1));
  }
  return whole_cpus(first_line(folder + "/cpu.cfs_quota_us"),
                    first_line(folder + "/cpu.cfs_period_us"));
}

/// The least quota of the control group `path` below `mount` and of those around it. In a container
/// the path may be that of the host: then only the mount itself exists.
int quota_of_group(const std::string& mount, std::string path) {
  int least = 0;
  for (;;) {
    const int quota = quota_of_folder(mount + path);
    if (quota > 0 && (least == 0 || quota < least)) {
      least = quota;
    }
    if (path.empty()) {
      return least;
    }
    path.resize(std::min(path.find_last_of('/'), path.size() - 1));
  }
}

/// Lines of /proc/self/cgroup are "number:controllers:path", without controllers in version 2.
int read_quota(const std::string& root) {
  int least = 0;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == std::string::npos) {
      continue;
    }
    for (const char* mount : {"", "/cpu", "/cpu,cpuacct", "/unified"}) {
      const int quota = quota_of_group(root + "/sys/fs/cgroup" + mount, path);
      if (quota > 0 && (least == 0 || quota < least)) {
        least = quota;
      }
    }
  }
  return least;
}

}  // namespace

std::vector<int> allowed_cpus() {
  CpuMask mask;
  CPU_ZERO_S(sizeof mask, mask.data());
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof mask, mask.data()) == 0) {
    for (int cpu = 0; cpu < kMostCpus; ++cpu) {
      if (CPU_ISSET_S(cpu, sizeof mask, mask.data())) {
        cpus.push_back(cpu);
      }
    }
  }
  return cpus.empty() ? std::vector<int>{0} : cpus;
}

int CpuTopology::usable_cpus() const {
  const int count = std::max(1, static_cast<int>(cpus.size()));
  return quota > 0 ? std::min(count, quota) : count;
}

int CpuTopology::usable_cores() const {
  const auto cores =
      std::count_if(cpus.begin(), cpus.end(), [](const Cpu& cpu) { return cpu.sibling == 0; });
  return std::min(usable_cpus(), std::max(1, static_cast<int>(cores)));
}

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> numbers;
  const char* at = text.data();
  const char* end = at + text.size();
  while (at != end) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    int last = first;
    if (parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
    }
    if (parsed.ec != std::errc() || first < 0 || last < first || last >= kMostCpus) {
      return {};
    }
    for (int number = first; number <= last; ++number) {
      numbers.push_back(number);
    }
    at = parsed.ptr;
    if (at != end && *at != ',') {
      return {};
    }
    at += at != end ? 1 : 0;
  }
  return numbers;
}

CpuTopology read_cpu_topology(const std::string& root) {
  const std::map<int, int> nodes = nodes_of_cpus(root);
  CpuTopology topology;
  const std::vector<int> usable = allowed_cpus();
  for (const int id : usable) {
    Cpu cpu{.id = id};
    const auto node = nodes.find(id);
    cpu.node = node == nodes.end() ? 0 : node->second;
    const std::string siblings = first_line(
        fmt::format("{}/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", root, id));
    for (const int other : parse_cpu_list(siblings)) {
      cpu.sibling += other < id && std::binary_search(usable.begin(), usable.end(), other) ? 1 : 0;
    }
    topology.cpus.push_back(cpu);
  }
  std::sort(topology.cpus.begin(), topology.cpus.end(), [](const Cpu& a, const Cpu& b) {
    return std::array{a.node, a.sibling, a.id} < std::array{b.node, b.sibling, b.id};
  });
  topology.quota = read_quota(root);
  return topology;
}

int usable_cores() { return read_cpu_topology().usable_cores(); }

ThreadPlan plan_threads(const CpuTopology& topology, const ThreadOptions& options) {
  const int threads = options.threads > 0 ? options.threads : topology.usable_cores();
  const auto cpus = static_cast<int64_t>(topology.cpus.size());
  ThreadPlan plan;
  plan.places.resize(static_cast<size_t>(threads));
  const bool many_nodes = cpus > 0 && topology.cpus.front().node != topology.cpus.back().node;
  const bool hold =
      options.pinning == Pinning::kCores || (options.numa == NumaMode::kAuto && many_nodes);
  if (!hold) {
    return plan;
  }
  int64_t begin = 0;
  while (begin < cpus) {  // one node after the other
    const int node = topology.cpus[static_cast<size_t>(begin)].node;
    std::vector<int> ids;
    for (int64_t i = begin; i < cpus && topology.cpus[static_cast<size_t>(i)].node == node; ++i) {
      ids.push_back(topology.cpus[static_cast<size_t>(i)].id);
    }
    const int64_t end = begin + static_cast<int64_t>(ids.size());
    const int64_t first = threads * begin / cpus;
    for (int64_t thread = first; thread < threads * end / cpus; ++thread) {
      const auto own = static_cast<size_t>(thread - first) % ids.size();
      plan.places[static_cast<size_t>(thread)] =
          options.pinning == Pinning::kCores ? std::vector<int>{ids[own]} : ids;
    }
    begin = end;
  }
  return plan;
}

void hold_to_cpus(const std::vector<int>& cpus, int except) {
  CpuMask mask;
  CPU_ZERO_S(sizeof mask, mask.data());
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < kMostCpus && cpu != except) {
      CPU_SET_S(cpu, sizeof mask, mask.data());
    }
  }
  static_cast<void>(sched_setaffinity(0, sizeof mask, mask.data()));
}

}  // namespace nibble
