#include "base/cpu_topology.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

/// A folder that looks like the root of a system.
class SystemFiles {
 public:
  SystemFiles() {
    root_ = testing::TempDir() + "cpu_topology_" +
            testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
  }
  ~SystemFiles() { std::filesystem::remove_all(root_); }
  SystemFiles(const SystemFiles&) = delete;
  SystemFiles& operator=(const SystemFiles&) = delete;

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  [[nodiscard]] const std::string& root() const { return root_; }

 private:
  std::string root_;
};

CpuTopology two_nodes_of_four() {
  CpuTopology topology;
  for (int id = 0; id < 8; ++id) {
    topology.cpus.push_back({.id = id, .node = id / 4, .sibling = id % 4 / 2});
  }
  return topology;
}

TEST(CpuTopology, ReadsListsOfTheSystem) {
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11"), (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("5"), std::vector<int>{5});
  for (const char* bad : {"", "a", "1-", "3-1", "1;2", "-1", "0-999999999", "1,,2"}) {
    EXPECT_TRUE(parse_cpu_list(bad).empty()) << bad;
  }
}

TEST(CpuTopology, AnEmptySystemIsOneNodeWithoutLimit) {
  const SystemFiles files;
  const CpuTopology topology = read_cpu_topology(files.root());
  EXPECT_EQ(topology.cpus.size(), allowed_cpus().size());
  EXPECT_EQ(topology.quota, 0);
  EXPECT_EQ(topology.usable_cores(), static_cast<int>(allowed_cpus().size()));
}

TEST(CpuTopology, ReadsNodesAndSiblings) {
  const std::vector<int> cpus = allowed_cpus();
  if (cpus.size() < 2) {
    GTEST_SKIP() << "needs two CPUs";
  }
  SystemFiles files;
  const std::string base = "/sys/devices/system";
  files.write(base + "/node/has_cpu", "0,2");
  files.write(base + "/node/node2/cpulist", std::to_string(cpus[0]));
  files.write(base + "/node/node0/cpulist", std::to_string(cpus[1]));
  EXPECT_EQ(read_cpu_topology(files.root()).cpus.front(), (Cpu{.id = cpus[1], .node = 0}));
  const auto siblings = std::to_string(cpus[0]) + "," + std::to_string(cpus[1]);
  files.write(base + "/cpu/cpu" + std::to_string(cpus[1]) + "/topology/thread_siblings_list",
              siblings);
  const CpuTopology topology = read_cpu_topology(files.root());
  EXPECT_THAT(topology.cpus, testing::Contains(Cpu{.id = cpus[1], .node = 0, .sibling = 1}));
  EXPECT_EQ(topology.usable_cores(), static_cast<int>(cpus.size()) - 1);
  EXPECT_EQ(topology.usable_cpus(), static_cast<int>(cpus.size()));
}

TEST(CpuTopology, ReadsTheLeastQuotaOfNestedGroups) {
  SystemFiles files;
  files.write("/proc/self/cgroup", "0::/a/b");
  files.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000");
  EXPECT_EQ(read_cpu_topology(files.root()).quota, 0);
  files.write("/sys/fs/cgroup/a/cpu.max", "250000 100000");
  EXPECT_EQ(read_cpu_topology(files.root()).quota, 2);
  files.write("/sys/fs/cgroup/a/b/cpu.max", "50000 100000");
  EXPECT_EQ(read_cpu_topology(files.root()).quota, 1);  // half a CPU still runs one thread
  EXPECT_EQ(read_cpu_topology(files.root()).usable_cores(), 1);
}

TEST(CpuTopology, ReadsTheQuotaOfAContainer) {
  SystemFiles files;
  files.write("/proc/self/cgroup", "12:memory:/docker/1\n4:cpu,cpuacct:/docker/1");
  files.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  files.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  EXPECT_EQ(read_cpu_topology(files.root()).quota, 0);
  files.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000");
  EXPECT_EQ(read_cpu_topology(files.root()).quota, 3);
}

TEST(ThreadPlan, LeavesOneNodeToTheSystem) {
  CpuTopology topology;
  topology.cpus = {{.id = 0}, {.id = 1}, {.id = 2}};
  const ThreadPlan plan = plan_threads(topology, {});
  EXPECT_EQ(plan.places, std::vector<std::vector<int>>(3));
  EXPECT_EQ(plan_threads(topology, {.threads = 2, .pinning = Pinning::kCores}).places,
            (std::vector<std::vector<int>>{{0}, {1}}));
}

TEST(ThreadPlan, SharesThreadsOverNodesInOrder) {
  const CpuTopology topology = two_nodes_of_four();
  const std::vector<int> first = {0, 1, 2, 3};
  const std::vector<int> second = {4, 5, 6, 7};
  EXPECT_EQ(plan_threads(topology, {}).places,  // one per core
            (std::vector<std::vector<int>>{first, first, second, second}));
  EXPECT_EQ(plan_threads(topology, {.threads = 3}).places,
            (std::vector<std::vector<int>>{first, second, second}));
  EXPECT_EQ(plan_threads(topology, {.threads = 4, .pinning = Pinning::kCores}).places,
            (std::vector<std::vector<int>>{{0}, {1}, {4}, {5}}));
  EXPECT_EQ(plan_threads(topology, {.threads = 2, .numa = NumaMode::kOff}).places,
            std::vector<std::vector<int>>(2));
}

TEST(ThreadPlan, NeverHasMoreThreadsThanTheQuota) {
  CpuTopology topology = two_nodes_of_four();
  topology.quota = 2;
  EXPECT_EQ(plan_threads(topology, {}).threads(), 2);
}

}  // namespace
}  // namespace nibble
