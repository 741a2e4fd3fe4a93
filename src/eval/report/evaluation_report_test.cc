#include "eval/report/evaluation_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace nibble {
namespace {

using testing::HasSubstr;

Json parsed(const char* text) { return Json::parse(text).value(); }

TEST(EvaluationReport, BringsTheResultsOfALabelTogether) {
  EvaluationReport report;
  ASSERT_TRUE(
      report.add("a", parsed(R"({"kld": 0.1, "kld_median": 0.02, "seconds": 2.5})"), "f").ok());
  ASSERT_TRUE(report.add("b", parsed(R"({"perplexity": 30.5, "seconds": 1.0})"), "f").ok());
  ASSERT_TRUE(report.add("a", parsed(R"({"strict_match": 0.5, "seconds": 4.0})"), "f").ok());
  ASSERT_TRUE(report
                  .add("a", parsed(R"({"nibble_quantization_report": 1, "totals": {"bytes_out": 77},
                       "tensors": [{"name": "x", "n": 4, "output_error": 0.1}]})"),
                       "f")
                  .ok());
  ASSERT_TRUE(
      report.add("a", parsed(R"({"scale_rule": "best", "bytes_out": 77, "seconds": 9})"), "f")
          .ok());
  const Json json = report.json();
  const JsonArray& methods = json.find("methods")->as_array();
  ASSERT_EQ(methods.size(), 2U);
  const Json& a = methods[0];
  EXPECT_EQ(a.find("label")->as_string(), "a");
  EXPECT_EQ(a.find("bytes")->as_int(), 77);
  EXPECT_EQ(a.find("seconds")->as_double(), 6.5);  // of evaluations
  EXPECT_EQ(a.find("quantize_seconds")->as_int(), 9);
  EXPECT_EQ(a.find("tensors")->dump(), R"([{"name":"x","output_error":0.1}])");
  EXPECT_EQ(methods[1].find("perplexity")->find("perplexity")->as_double(), 30.5);
}

TEST(EvaluationReport, ModelsOfOneRunAreMethods) {
  EvaluationReport report;
  const Json tasks = parsed(R"({"models": [{"model": "m/base", "tasks": [{"task": "t"}]},
      {"model": "m/q", "tasks": [{"task": "t"}]}],
      "differences": [{"task": "t", "model": "m/q", "acc": -0.1}]})");
  ASSERT_TRUE(report.add("file", tasks, "f").ok());
  const Json json = report.json();
  const JsonArray& methods = json.find("methods")->as_array();
  ASSERT_EQ(methods.size(), 2U);
  EXPECT_EQ(methods[1].find("label")->as_string(), "q");
  EXPECT_EQ(methods[0].find("differences")->as_array().size(), 0U);
  EXPECT_EQ(methods[1].find("differences")->as_array().size(), 1U);
}

TEST(EvaluationReport, RefusesWhatItDoesNotKnowAndWhatIsThereTwice) {
  EvaluationReport report;
  const Json kld = parsed(R"({"kld": 0.1, "kld_median": 0.02})");
  ASSERT_TRUE(report.add("a", kld, "one.json").ok());
  EXPECT_THAT(report.add("a", kld, "two.json").message(), HasSubstr("two.json: \"a\" has such"));
  for (const char* text :
       {"{}", "[]", R"({"models": 3})", R"({"nibble_quantization_report": 1})"}) {
    EXPECT_THAT(report.add("b", parsed(text), "x.json").message(), HasSubstr("x.json: neither"));
  }
}

TEST(EvaluationReport, IsOnePageThatLabelsCannotBreak) {
  EvaluationReport report;
  ASSERT_TRUE(report.add("</script><b>", parsed(R"({"perplexity": 3.5})"), "f").ok());
  const std::string page = evaluation_html(report);
  EXPECT_EQ(page.find("</script><b>"), std::string::npos);
  for (const char* outside : {"src=", "<link", "@import", "url(", "fetch(", "https://", "@REPORT@",
                              "@STYLE@", "@TOOLS@"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  const std::string open = R"(<script type="application/json" id="report">)";
  const size_t begin = page.find(open) + open.size();
  const auto json = Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json->dump(), report.json().dump());
}

}  // namespace
}  // namespace nibble
