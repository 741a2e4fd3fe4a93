#include "quantizer/rtn.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

TEST(ScaleRules, ParseByName) {
  EXPECT_EQ(parse_scale_rule("absmax7.5").value(), ScaleRule::kAbsMaxHalf);
  EXPECT_EQ(parse_scale_rule("absmax7").value(), ScaleRule::kAbsMax);
  EXPECT_EQ(parse_scale_rule("quark").value(), ScaleRule::kQuark);
  EXPECT_EQ(scale_rule_name(ScaleRule::kLsqSigned), "lsq_signed");
  EXPECT_EQ(parse_scale_rule("no").status().code(), StatusCode::kInvalidArgument);
}

TEST(QuantError, DecibelsAreCapped) {
  EXPECT_EQ((QuantError{.signal = 100, .noise = 1}).snr_db(), 20);
  EXPECT_EQ((QuantError{.signal = 1, .noise = 0}).snr_db(), 200);
  EXPECT_EQ((QuantError{.signal = 0, .noise = 1}).snr_db(), -200);
}

}  // namespace
}  // namespace nibble
