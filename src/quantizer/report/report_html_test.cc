#include "quantizer/report/report_html.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

Json report_of(const char* name) {
  return Json::object({{"model", "m"},
                       {"totals", Json::object({{"bytes_in", 200}, {"bytes_out", 50}})},
                       {"tensors", JsonArray{Json::object({{"name", name}, {"snr_db", 21.5}})}}});
}

// What stands between the tags of the element that holds the report.
std::string embedded(const std::string& page) {
  const std::string open = R"(<script type="application/json" id="report">)";
  const size_t begin = page.find(open) + open.size();
  return page.substr(begin, page.find("</script>", begin) - begin);
}

TEST(ReportHtmlTest, HoldsTheReport) {
  const Json report = report_of("model.layers.0.mlp.up_proj");
  const auto parsed = Json::parse(embedded(report_html(report)));
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->dump(), report.dump());
}

TEST(ReportHtmlTest, NamesCannotEndTheScript) {
  const Json report = report_of("a</script><script>alert(1)</script>");
  const std::string page = report_html(report);
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  const auto parsed = Json::parse(embedded(page));
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->dump(), report.dump());
}

TEST(ReportHtmlTest, NeedsNothingElse) {
  const std::string page = report_html(report_of("x"));
  for (const char* outside : {"src=", "<link", "@import", "url(", "fetch(", "https://"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  EXPECT_EQ(page.find("@REPORT@"), std::string::npos);
}

}  // namespace
}  // namespace nibble
