#include "backend/range_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::HasSubstr;

TEST(RangeReport, WarnsOfTheFirstNumbersAndOfEveryTenfold) {
  RangeReport report;
  const auto said = [&](int64_t count) {
    testing::internal::CaptureStderr();
    report.add(count);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(0), "");
  EXPECT_THAT(said(1), HasSubstr(" 1 keys and values so far lay far outside of the int4_static"));
  EXPECT_EQ(said(0), "");
  EXPECT_EQ(said(8), "");
  EXPECT_THAT(said(1), HasSubstr(" 10 keys and values"));
  EXPECT_THAT(said(1990), HasSubstr(" 2000 keys and values"));
  EXPECT_EQ(said(7999), "");
  EXPECT_THAT(said(1), HasSubstr(" 10000 keys and values"));
}

}  // namespace
}  // namespace nibble
