#include "base/mapped_bytes.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"

namespace nibble {
namespace {

constexpr size_t kSize = size_t{3} << 20;

std::byte byte_at(size_t i) { return static_cast<std::byte>(i * 2654435761U >> 13U); }

class MappedBytes : public testing::Test {
 public:
  MappedBytes() {
    std::string pattern = testing::TempDir() + "/mappedXXXXXX";
    path_ = mkdtemp(pattern.data());
    std::string text(kSize, '\0');
    for (size_t i = 0; i < kSize; ++i) {
      text[i] = static_cast<char>(byte_at(i));
    }
    std::ofstream(path_ + "/a", std::ios::binary) << text;
    file_.emplace(MappedFile::open(path_ + "/a").value());
  }
  ~MappedBytes() override { std::filesystem::remove_all(path_); }

 protected:
  // How many bytes of [begin, begin + count) are wrong.
  size_t wrong(size_t begin, size_t count) {
    std::vector<std::byte> out(count);
    copy_bytes(file_->bytes().data() + begin, count, out.data());
    size_t bad = 0;
    for (size_t i = 0; i < count; ++i) {
      bad += out[i] == byte_at(begin + i) ? 0 : 1;
    }
    return bad;
  }

  std::string path_;
  std::optional<MappedFile> file_;
};

TEST_F(MappedBytes, CopiesPiecesOfAnySize) {
  for (const size_t count : {1UL, 100UL, 16383UL, 16384UL, 70001UL, kSize - 5}) {
    for (const size_t begin : {0UL, 1UL, 4UL}) {
      EXPECT_EQ(wrong(begin, count), 0U) << begin << ' ' << count;
    }
  }
  EXPECT_EQ(wrong(kSize - 20000, 20000), 0U);
  EXPECT_EQ(wrong(kSize - 1, 1), 0U);
}

TEST_F(MappedBytes, CopiesMemoryOfOthers) {
  std::vector<std::byte> from(100'000, std::byte{7});
  std::vector<std::byte> to(from.size());
  copy_bytes(from.data(), from.size(), to.data());
  EXPECT_EQ(from, to);
}

// Bytes that are changed behind the mapping's back show where a copy comes from.
TEST_F(MappedBytes, LongPiecesComeFromTheFileAlsoAfterItMoved) {
  MappedFile moved(std::move(*file_));
  file_.emplace(std::move(moved));
  auto* page = const_cast<std::byte*>(file_->bytes().data());
  ASSERT_EQ(mprotect(page, 4096, PROT_READ | PROT_WRITE), 0);
  page[0] = ~byte_at(0);  // of this process alone
  EXPECT_EQ(wrong(0, 65536), 0U);
  EXPECT_EQ(wrong(0, 100), 1U);
}

TEST_F(MappedBytes, AFileThatWasUnmappedIsForgotten) {
  const std::byte* place = file_->bytes().data();
  file_.reset();
  void* other = mmap(const_cast<std::byte*>(place), kSize, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  ASSERT_EQ(other, place);
  std::vector<std::byte> out(kSize, std::byte{1});
  copy_bytes(place, kSize, out.data());
  EXPECT_EQ(out, std::vector<std::byte>(kSize));
  munmap(other, kSize);
}

TEST_F(MappedBytes, ThreadsCopyWhileFilesComeAndGo) {
  std::vector<size_t> bad(2);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 50; ++i) {
        bad[t] += wrong(i * 1000 + t, 100'000);
      }
    });
  }
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(MappedFile::open(path_ + "/a").ok());
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(bad, std::vector<size_t>(2));
}

}  // namespace
}  // namespace nibble
