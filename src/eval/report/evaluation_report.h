#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"

namespace nibble {

/// Brings results of several methods together: what `nibble eval` and `nibble quantize` print with
/// --json, and quantization_report.json. Results of one label belong to one method.
class EvaluationReport final {
 public:
  /// where: the file, for errors. Results of tasks with several models become methods by the
  /// models' names instead. kInvalidArgument for JSON of another kind, or the same kind twice for
  /// a method.
  Status add(const std::string& label, const Json& result, const std::string& where);

  /// {"methods": [{"label", "kld", "perplexity", "gsm8k", "tasks", "differences", "bytes",
  /// "seconds", "quantize_seconds", "tensors"}]}, in the order in which labels came.
  [[nodiscard]] Json json() const;

 private:
  Status add_tasks(const std::string& label, const Json& result, const std::string& where);
  Status set(const std::string& label,
             const std::string& key,
             Json value,
             const std::string& where);
  void add_seconds(const std::string& label, const Json& result);
  Json& method(const std::string& label);

  JsonArray methods_;
};

/// A web page of its own (no other file, no network) that shows a report: methods and metrics,
/// distributions of KL divergences, sizes, tasks with their errors, and what calibration did.
[[nodiscard]] std::string evaluation_html(const EvaluationReport& report);

}  // namespace nibble
