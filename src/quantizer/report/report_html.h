#pragma once

#include <string>

#include "base/json.h"

namespace nibble {

/// A web page of its own (no other file, no network) that shows a quantization report: totals,
/// signal to noise by layer and by kind, sizes before and after, the worst tensors and a table of
/// all that sorts and filters.
///   report  {"model": name, "totals": {"bytes_in", "bytes_out", "snr_db_mean", "snr_db_min"},
///           "tensors": [{"name", "scheme", "source", "n", "k", "bytes_in", "bytes_out", "snr_db",
///           "cosine", "max_error", "clipped", "zeros", "scale_low", "scale_high"}]}
[[nodiscard]] std::string report_html(const Json& report);

}  // namespace nibble
