#include "quantizer/report/report_html.h"

#include <string_view>

#include "base/check.h"
#include "report_page.h"  // made from report_page.html by the build

namespace nibble {

std::string report_html(const Json& report) {
  constexpr std::string_view kPlace = "@REPORT@";
  constexpr std::string_view kPage = kReportPage;
  const size_t at = kPage.find(kPlace);
  CHECK_NE(at, std::string_view::npos);
  std::string page(kPage.substr(0, at));
  for (const char c : report.dump()) {
    if (c == '<') {
      page += "\\u003c";  // text like "</script>" must not end the element that holds the JSON
    } else {
      page += c;
    }
  }
  page += kPage.substr(at + kPlace.size());
  return page;
}

}  // namespace nibble
