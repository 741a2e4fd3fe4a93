#include "quantizer/report/report_html.h"

#include <string_view>

#include "base/check.h"
#include "report_page.h"  // made from report_page.html by the build

namespace nibble {

std::string page_with(std::string_view page, const Json& json) {
  constexpr std::string_view kPlace = "@REPORT@";
  const size_t at = page.find(kPlace);
  CHECK_NE(at, std::string_view::npos);
  std::string text(page.substr(0, at));
  for (const char c : json.dump()) {
    if (c == '<') {
      text += "\\u003c";  // text like "</script>" must not end the element that holds the JSON
    } else {
      text += c;
    }
  }
  text += page.substr(at + kPlace.size());
  return text;
}

std::string report_html(const Json& report) { return page_with(kReportPage, report); }

}  // namespace nibble
