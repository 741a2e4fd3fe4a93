#include "backend/cuda/step_buffers.h"

#include <vector>

#include "backend/cuda/testing/gpu_test.h"

namespace nibble::cuda {
namespace {

/// A step of two sequences with one row each, and their pages in two pools.
struct TwoRows {
  std::vector<std::vector<int32_t>> pages;  // [pool * 2 + sequence]
  std::vector<int32_t> tokens = {5, 6};
  std::vector<int32_t> logit_rows = {0, 1};
  std::vector<SequenceSpan> sequences, others;

  explicit TwoRows(std::vector<std::vector<int32_t>> lists) : pages(std::move(lists)) {
    for (size_t i = 0; i < pages.size(); ++i) {
      const auto sequence = static_cast<int32_t>(i % 2);
      (i < 2 ? sequences : others)
          .push_back({.q_begin = sequence,
                      .q_len = 1,
                      .kv_len = static_cast<int32_t>(pages[i].size()) * 16,
                      .pages = pages[i].data()});
    }
  }

  [[nodiscard]] StepPlan plan() const {
    return {.input = {.tokens = tokens,
                      .sequences = sequences,
                      .logit_rows = logit_rows,
                      .other_pools = others},
            .page_size = 16};
  }
};

/// The page table of a sequence in a pool, as kernels see it.
std::vector<int32_t> table(const StepBuffers& buffers,
                           int32_t pool,
                           int64_t sequence,
                           size_t size) {
  const StepMetadata step = buffers.metadata(pool);
  std::vector<int32_t> row(size, -7);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(row.data(), step.page_table + sequence * step.page_table_stride,
                       size * sizeof(int32_t), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return row;
}

TEST(StepBuffers, KeepAPageTableForEachPool) {
  NIBBLE_NEEDS_GPU();
  auto buffers =
      StepBuffers::create({.rows = 4, .sequences = 4, .positions = 512, .pools = 2}).value();
  const TwoRows step({{1, 2, 3}, {4, 5}, {11, 12, 13}, {14, 15}});
  const StepShape shape{2, 2};
  ASSERT_TRUE(buffers.write(step.plan(), shape, nullptr).ok());
  for (int32_t pool = 0; pool < 2; ++pool) {
    for (size_t s = 0; s < 2; ++s) {
      const std::vector<int32_t>& pages = step.pages[static_cast<size_t>(pool) * 2 + s];
      EXPECT_EQ(table(buffers, pool, static_cast<int64_t>(s), pages.size()), pages);
    }
  }
  // A page more in one pool, another one in the other.
  const TwoRows next({{1, 2, 3, 9}, {4, 5}, {0, 12, 13, 19}, {14, 16}});
  ASSERT_TRUE(buffers.write(next.plan(), shape, nullptr).ok());
  EXPECT_EQ(table(buffers, 0, 0, 4), next.pages[0]);
  EXPECT_EQ(table(buffers, 0, 1, 2), next.pages[1]);
  EXPECT_EQ(table(buffers, 1, 0, 4), next.pages[2]);
  EXPECT_EQ(table(buffers, 1, 1, 2), next.pages[3]);
  // Without lists of their own, pools have the same page numbers.
  const TwoRows equal({{7, 8}, {9, 10}});
  ASSERT_TRUE(buffers.write(equal.plan(), shape, nullptr).ok());
  EXPECT_EQ(table(buffers, 1, 0, 2), equal.pages[0]);
  EXPECT_EQ(table(buffers, 1, 1, 2), equal.pages[1]);
}

TEST(StepBuffers, SayHowManyRowsOfARecordedStepThereAre) {
  NIBBLE_NEEDS_GPU();
  auto buffers =
      StepBuffers::create({.rows = 16, .sequences = 8, .positions = 512, .pools = 1}).value();
  const TwoRows step({{1, 2, 3}, {4, 5}});
  const auto rows_there = [&] {
    int32_t rows = -1;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(&rows, buffers.rows_there(), sizeof(rows), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return rows;
  };
  ASSERT_TRUE(buffers.write(step.plan(), {2, 2}, nullptr).ok());
  EXPECT_EQ(rows_there(), 2);
  const int32_t* const of_two = buffers.rows_there();
  ASSERT_TRUE(buffers.write(step.plan(), {8, 8}, nullptr).ok());  // recorded for 8
  EXPECT_EQ(rows_there(), 2);
  EXPECT_NE(buffers.rows_there(), of_two);  // a record of 8 looks where its last sequence ends
  StepPlan fed = step.plan();
  fed.input.fed = true;
  ASSERT_TRUE(buffers.write(fed, {8, 8}, nullptr).ok());
  EXPECT_EQ(rows_there(), 2);
}

}  // namespace
}  // namespace nibble::cuda
