#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace nibble {

/// A web page of its own (no other file, no network) that shows a quantization report: totals,
/// signal to noise by layer and by kind, sizes before and after, the worst tensors and a table of
/// all that sorts and filters.
///   report  {"model": name, "totals": {"bytes_in", "bytes_out", "snr_db_mean", "snr_db_min"},
///           "tensors": [{"name", "scheme", "source", "n", "k", "bytes_in", "bytes_out", "snr_db",
///           "cosine", "max_error", "clipped", "zeros", "scale_low", "scale_high"; of calibrated
///           ones "rounding", "output_error", "output_error_rtn"}]}
[[nodiscard]] std::string report_html(const Json& report);

/// A page with JSON in the place of "@REPORT@", so written that it ends no element.
[[nodiscard]] std::string page_with(std::string_view page, const Json& json);

}  // namespace nibble
