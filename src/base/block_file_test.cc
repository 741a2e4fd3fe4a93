#include "base/block_file.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int64_t kBlock = BlockFile::kBlock;

struct Part {
  int64_t begin = 0;
  int64_t bytes = 0;
};

class BlockFileTest : public testing::Test {
 protected:
  BlockFileTest() {
    std::string pattern = testing::TempDir() + "/block_fileXXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~BlockFileTest() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path() const { return folder_ + "/file"; }

  static std::string text_of(int64_t bytes) {
    std::string text(static_cast<size_t>(bytes), '\0');
    uint32_t state = 1;
    for (char& byte : text) {
      state = state * 1664525 + 1013904223;
      byte = static_cast<char>(state >> 24);
    }
    return text;
  }

  static Status put(BlockFile& file, const std::string& text, const Part& part) {
    BlockMemory memory(BlockMemory::needed(part.bytes));
    const std::span<std::byte> staged = memory.take(part.begin, part.bytes);
    std::memcpy(staged.data(), text.data() + part.begin, staged.size());
    return file.write(part.begin, staged);
  }

  // Cuts at these offsets, in a random order, by several threads.
  void check_cuts(std::vector<int64_t> cuts, unsigned seed) {
    std::sort(cuts.begin(), cuts.end());
    const std::string text = text_of(cuts.back());
    std::vector<Part> parts;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      parts.push_back({cuts[i], cuts[i + 1] - cuts[i]});
    }
    std::shuffle(parts.begin(), parts.end(), std::mt19937(seed));
    auto file = BlockFile::open_locked(path(), cuts.back()).value();
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (size_t part = next++; part < parts.size(); part = next++) {
          EXPECT_TRUE(put(*file, text, parts[part]).ok());
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    ASSERT_TRUE(file->flush().ok());
    EXPECT_TRUE(read_file(path()).value() == text) << "seed " << seed;
    file.reset();
    fs::remove(path());
  }

 private:
  std::string folder_;
};

TEST_F(BlockFileTest, PartsOfAnySizeInAnyOrder) {
  std::mt19937 random(7);
  for (unsigned seed = 0; seed < 40; ++seed) {
    const int64_t size = static_cast<int64_t>(random() % (40 * kBlock)) + 1;
    std::vector<int64_t> cuts = {0, size};
    for (unsigned i = 0; i < seed; ++i) {
      // Also empty parts, tiny ones, and such that begin or end with a block.
      const auto at = static_cast<int64_t>(random() % static_cast<uint64_t>(size));
      cuts.push_back(at);
      cuts.push_back(std::min(size, at + static_cast<int64_t>(random() % 20)));
      cuts.push_back(at / kBlock * kBlock);
    }
    check_cuts(cuts, seed);
  }
}

TEST_F(BlockFileTest, MoreOpenBlocksThanAreKept) {
  std::vector<int64_t> cuts;
  for (int64_t at = 0; at <= 2000 * kBlock; at += kBlock / 2) {
    cuts.push_back(at + (at % kBlock == 0 ? 0 : 8));
  }
  check_cuts(cuts, 1);
}

TEST_F(BlockFileTest, SizesAroundOneBlock) {
  for (const int64_t size : {int64_t{1}, kBlock - 1, kBlock, kBlock + 1, 2 * kBlock}) {
    check_cuts({0, size}, 0);
    check_cuts({0, size / 2, size}, 1);
  }
}

TEST_F(BlockFileTest, SharedBlocksWaitForTheirLastPart) {
  const std::string text = text_of(3 * kBlock);
  auto file = BlockFile::open_locked(path(), 3 * kBlock).value();
  ASSERT_TRUE(put(*file, text, {0, kBlock + 100}).ok());
  const auto second = [&] { return read_file(path()).value().substr(kBlock, kBlock); };
  const bool first_there = read_file(path()).value().substr(0, kBlock) == text.substr(0, kBlock);
  EXPECT_TRUE(first_there);
  EXPECT_NE(second().substr(0, 100), text.substr(kBlock, 100));
  ASSERT_TRUE(put(*file, text, {kBlock + 100, kBlock - 100}).ok());
  EXPECT_EQ(second(), text.substr(kBlock, kBlock));
}

TEST_F(BlockFileTest, FlushingKeepsWhatTheFileHas) {
  const std::string text = text_of(2 * kBlock);
  {
    auto file = BlockFile::open_locked(path(), 2 * kBlock).value();
    ASSERT_TRUE(put(*file, text, {0, 1000}).ok());
  }  // as when a run is stopped
  EXPECT_EQ(read_file(path()).value().substr(0, 1000), text.substr(0, 1000));
  auto file = BlockFile::open_locked(path(), 2 * kBlock).value();
  ASSERT_TRUE(put(*file, text, {2000, 2 * kBlock - 2000}).ok());
  ASSERT_TRUE(file->flush().ok());
  ASSERT_TRUE(put(*file, text, {1000, 1000}).ok());
  ASSERT_TRUE(file->flush().ok());
  EXPECT_EQ(read_file(path()).value(), text);
}

TEST_F(BlockFileTest, OneWriterOnly) {
  const auto file = BlockFile::open_locked(path(), 100).value();
  EXPECT_EQ(BlockFile::open_locked(path(), 100).status().code(), StatusCode::kUnavailable);
}

// Files that cannot grow beyond a limit stand for a full disk; limits are for a whole process.
TEST_F(BlockFileTest, FullDisk) {
  for (const int64_t limit :
       {int64_t{0}, int64_t{1}, 3 * kBlock, 3 * kBlock + 5, 20 * kBlock - 1}) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::signal(SIGXFSZ, SIG_IGN);
      const auto bytes = static_cast<rlim_t>(limit);
      const rlimit limits = {bytes, bytes};
      ::setrlimit(RLIMIT_FSIZE, &limits);
      auto file = BlockFile::open_locked(path(), 20 * kBlock);
      const Status status =
          file.ok() ? put(**file, text_of(20 * kBlock), {0, 20 * kBlock}) : file.status();
      const bool named = status.message().find("file: cannot write") != std::string::npos;
      _exit(status.code() == StatusCode::kResourceExhausted && named ? 0 : 1);
    }
    int result = 0;
    ASSERT_EQ(waitpid(child, &result, 0), child);
    EXPECT_TRUE(WIFEXITED(result) && WEXITSTATUS(result) == 0) << limit;
    EXPECT_LE(fs::file_size(path()), static_cast<uintmax_t>(limit));
    fs::remove(path());
  }
}

TEST(BlockMemory, KeepsThePlaceInABlock) {
  BlockMemory memory(BlockMemory::needed(100) + BlockMemory::needed(5000));
  for (int round = 0; round < 2; ++round) {
    const auto a = memory.take(7 * kBlock + 4090, 100);
    const auto b = memory.take(123, 5000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % kBlock, 4090U);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % kBlock, 123U);
    EXPECT_EQ(a.size(), 100U);
    EXPECT_GE(b.data() - (a.data() + a.size()), 4096 - 94);  // both may be overwritten by blocks
    memory.clear();
  }
}

}  // namespace
}  // namespace nibble
