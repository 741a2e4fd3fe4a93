#include "eval/report/evaluation_report.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/file.h"
#include "evaluation_page.h"  // made from evaluation_page.html by the build
#include "quantizer/report/report_html.h"

namespace nibble {
namespace {

bool has(const Json& json, std::string_view key) { return json.find(key) != nullptr; }

/// What the page shows of a quantized matrix.
Json shown_tensors(const Json& report) {
  constexpr std::array kKeys = {"name",         "scheme",           "snr_db",          "rounding",
                                "output_error", "output_error_rtn", "calibration_rows"};
  JsonArray shown;
  for (const Json& tensor : report.find("tensors")->as_array()) {
    Json some = Json::object({});
    for (const char* key : kKeys) {
      if (const Json* value = tensor.find(key)) {
        some.set(key, *value);
      }
    }
    shown.push_back(std::move(some));
  }
  return shown;
}

bool is_array(const Json& json, std::string_view key) {
  return has(json, key) && json.find(key)->is_array();
}

}  // namespace

Json& EvaluationReport::method(const std::string& label) {
  const auto found = std::ranges::find_if(
      methods_, [&](const Json& method) { return method.find("label")->as_string() == label; });
  if (found != methods_.end()) {
    return *found;
  }
  methods_.push_back(Json::object({{"label", label}}));
  return methods_.back();
}

Status EvaluationReport::set(const std::string& label,
                             const std::string& key,
                             Json value,
                             const std::string& where) {
  Json& to = method(label);
  if (has(to, key)) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: \"{}\" has such a result already; give each method a label of its own, "
                      "as LABEL=FILE",
                      where, label);
  }
  to.set(key, std::move(value));
  return {};
}

void EvaluationReport::add_seconds(const std::string& label, const Json& result) {
  const Json* seconds = result.find("seconds");
  if (seconds != nullptr && seconds->is_number()) {
    Json& to = method(label);
    const Json* before = to.find("seconds");
    const double sum = (before == nullptr ? 0 : before->as_double()) + seconds->as_double();
    to.set("seconds", sum);
  }
}

Status EvaluationReport::add_tasks(const std::string& label,
                                   const Json& result,
                                   const std::string& where) {
  const JsonArray& models = result.find("models")->as_array();
  for (const Json& model : models) {
    const Json* name = model.find("model");
    if (name == nullptr || !name->is_string() || !is_array(model, "tasks")) {
      return make_error(StatusCode::kInvalidArgument, "{}: a model without a name or tasks", where);
    }
    const std::string own = models.size() == 1 ? label : std::string(file_name(name->as_string()));
    NIBBLE_RETURN_IF_ERROR(set(own, "tasks", *model.find("tasks"), where));
    add_seconds(own, model);
    JsonArray differences;
    for (const Json& difference : result.find("differences")->as_array()) {
      const Json* of = difference.find("model");
      if (of != nullptr && of->is_string() && of->as_string() == name->as_string()) {
        differences.push_back(difference);
      }
    }
    NIBBLE_RETURN_IF_ERROR(set(own, "differences", std::move(differences), where));
  }
  return {};
}

Status EvaluationReport::add(const std::string& label,
                             const Json& result,
                             const std::string& where) {
  if (is_array(result, "models") && is_array(result, "differences")) {
    return add_tasks(label, result, where);
  }
  if (has(result, "nibble_quantization_report") && is_array(result, "tensors") &&
      has(result, "totals") && has(*result.find("totals"), "bytes_out")) {
    method(label).set("bytes", *result.find("totals")->find("bytes_out"));
    return set(label, "tensors", shown_tensors(result), where);
  }
  if (has(result, "scale_rule") && has(result, "bytes_out") && has(result, "seconds")) {
    method(label).set("bytes", *result.find("bytes_out"));
    return set(label, "quantize_seconds", *result.find("seconds"), where);
  }
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kKinds = {
      {{"kld_median", "kld"}, {"perplexity", "perplexity"}, {"strict_match", "gsm8k"}}};
  for (const auto& [key, kind] : kKinds) {
    if (has(result, key)) {
      add_seconds(label, result);
      return set(label, std::string(kind), result, where);
    }
  }
  return make_error(StatusCode::kInvalidArgument,
                    "{}: neither what nibble eval or nibble quantize prints with --json, nor a "
                    "quantization_report.json",
                    where);
}

Json EvaluationReport::json() const { return Json::object({{"methods", methods_}}); }

std::string evaluation_html(const EvaluationReport& report) {
  return page_with(kEvaluationPage, report.json());
}

}  // namespace nibble
