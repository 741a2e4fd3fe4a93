#include "quantizer/journal.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/file.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

JobRecord record_of(double signal) {
  JobRecord record;
  record.digests = {digest_of("a"), digest_of(std::to_string(signal))};
  record.error = {.count = 7,
                  .signal = signal,
                  .noise = 0.1,
                  .product = -1.0 / 3,
                  .energy = 1e300,
                  .max_error = 0.3F,
                  .clipped = 2,
                  .zeros = 1,
                  .scale_low = 1e-30F,
                  .scale_high = 0.7F};
  return record;
}

class JournalTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "/journal_" +
            testing::UnitTest::GetInstance()->current_test_info()->name() + ".jsonl";
    fs::remove(path_);
  }
  void TearDown() override { fs::remove(path_); }

  void write_three() const {
    JournalContent content;
    Journal journal = Journal::open(path_, "plan", content).value();
    ASSERT_TRUE(journal.add_job("one", record_of(1.0 / 3)).ok());
    ASSERT_TRUE(journal.add_job("two", record_of(2)).ok());
    ASSERT_TRUE(journal.add_shard("file").ok());
  }

  std::string path_;
};

TEST_F(JournalTest, GivesBackWhatWasWritten) {
  EXPECT_EQ(read_journal(path_).value().plan, "");
  write_three();
  const JournalContent content = read_journal(path_).value();
  EXPECT_EQ(content.plan, "plan");
  EXPECT_EQ(content.shards.count("file"), 1U);
  ASSERT_EQ(content.jobs.size(), 2U);
  const JobRecord expected = record_of(1.0 / 3);
  const JobRecord& one = content.jobs.at("one");
  EXPECT_EQ(one.digests, expected.digests);
  EXPECT_EQ(one.error.signal, expected.error.signal);  // to the last bit
  EXPECT_EQ(one.error.product, expected.error.product);
  EXPECT_EQ(one.error.energy, expected.error.energy);
  EXPECT_EQ(one.error.max_error, expected.error.max_error);
  EXPECT_EQ(one.error.scale_low, expected.error.scale_low);
  EXPECT_EQ(one.error.clipped, 2);
}

TEST_F(JournalTest, EveryCutAndEveryFlippedBitLosesOnlyWhatFollows) {
  write_three();
  const std::string whole = read_file(path_).value();
  std::vector<size_t> ends;
  for (size_t at = 0; (at = whole.find('\n', at)) != std::string::npos; ++at) {
    ends.push_back(at + 1);
  }
  ASSERT_EQ(ends.size(), 4U);
  for (size_t at = 0; at < whole.size(); ++at) {
    const auto lines = static_cast<size_t>(
        std::count_if(ends.begin(), ends.end(), [&](size_t end) { return end <= at; }));
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 1);
    for (const std::string& text : {whole.substr(0, at), flipped}) {
      std::ofstream(path_, std::ios::trunc | std::ios::binary) << text;
      const JournalContent content = read_journal(path_).value();
      EXPECT_EQ(content.valid_bytes, lines == 0 ? 0 : static_cast<int64_t>(ends[lines - 1])) << at;
      EXPECT_EQ(content.jobs.size(), lines == 0 ? 0 : std::min(lines - 1, size_t{2}));
    }
  }
}

TEST_F(JournalTest, GoesOnAfterATornLine) {
  write_three();
  fs::resize_file(path_, fs::file_size(path_) - 5);
  JournalContent content;
  {
    Journal journal = Journal::open(path_, "plan", content).value();
    EXPECT_EQ(content.jobs.size(), 2U);
    EXPECT_TRUE(content.shards.empty());
    ASSERT_TRUE(journal.add_job("three", record_of(3)).ok());
    EXPECT_EQ(Journal::open(path_, "plan", content).status().code(), StatusCode::kUnavailable);
  }
  EXPECT_EQ(read_journal(path_).value().jobs.size(), 3U);
}

TEST(Digest, IsXxh3OfChunkHashes) {
  // Of the reference implementation (xxhsum -H2).
  EXPECT_EQ(digest_text(digest_of("")), "99aa06d3014798d86001c324468d497f");
  const std::array chunks = {digest_of("a"), digest_of("b")};
  EXPECT_NE(combine_digests(chunks), digest_of("ab"));
  EXPECT_EQ(combine_digests(chunks), digest_of(std::as_bytes(std::span(chunks))));
}

}  // namespace
}  // namespace nibble
