#include "quantizer/quantize_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/file.h"
#include "quantizer/report/report_html.h"
#include "quantizer/rtn.h"

namespace nibble {
namespace {

constexpr int64_t kVersion = 1;

Json tensor_json(const QuantizedTensor& tensor) {
  Json json = Json::object({{"name", tensor.name},
                            {"scheme", tensor.scheme},
                            {"source", tensor.source},
                            {"n", tensor.n},
                            {"k", tensor.k},
                            {"bytes_in", tensor.bytes_in},
                            {"bytes_out", tensor.bytes_out},
                            {"snr_db", tensor.snr_db},
                            {"cosine", tensor.cosine},
                            {"max_error", tensor.max_error},
                            {"clipped", tensor.clipped},
                            {"zeros", tensor.zeros},
                            {"scale_low", tensor.scale_low},
                            {"scale_high", tensor.scale_high}});
  if (tensor.calibration) {
    json.set("rounding", tensor.calibration->rounding);
    json.set("output_error", tensor.calibration->error);
    json.set("output_error_rtn", tensor.calibration->rtn_error);
    json.set("calibration_rows", tensor.calibration->rows);
    if (!tensor.calibration->fallback.empty()) {
      json.set("fallback", tensor.calibration->fallback);
    }
  }
  return json;
}

Result<QuantizedTensor> tensor_from_json(const Json& json) {
  const JsonReader reader(json, std::string(kReportName));
  QuantizedTensor tensor;
  NIBBLE_ASSIGN_OR_RETURN(tensor.name, reader.required_string("name"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.scheme, reader.required_string("scheme"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.source, reader.required_string("source"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.n, reader.required_int("n"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.k, reader.required_int("k"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.bytes_in, reader.required_int("bytes_in"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.bytes_out, reader.required_int("bytes_out"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.snr_db, reader.required_double("snr_db"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.cosine, reader.required_double("cosine"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.max_error, reader.required_double("max_error"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.clipped, reader.required_int("clipped"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.zeros, reader.required_int("zeros"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.scale_low, reader.required_double("scale_low"));
  NIBBLE_ASSIGN_OR_RETURN(tensor.scale_high, reader.required_double("scale_high"));
  if (json.find("rounding") != nullptr) {
    CalibrationRecord& calibration = tensor.calibration.emplace();
    NIBBLE_ASSIGN_OR_RETURN(calibration.rounding, reader.required_string("rounding"));
    NIBBLE_ASSIGN_OR_RETURN(calibration.error, reader.required_double("output_error"));
    NIBBLE_ASSIGN_OR_RETURN(calibration.rtn_error, reader.required_double("output_error_rtn"));
    NIBBLE_ASSIGN_OR_RETURN(calibration.rows, reader.optional_int("calibration_rows", 0));
    NIBBLE_ASSIGN_OR_RETURN(calibration.fallback, reader.optional_string("fallback", ""));
  }
  return tensor;
}

Result<QuantizeReport> report_from_json(const Json& json) {
  const Json* totals = json.find("totals");
  const Json* tensors = json.find("tensors");
  if (totals == nullptr || tensors == nullptr || !tensors->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: holds no totals or tensors", kReportName);
  }
  const JsonReader reader(*totals, std::string(kReportName));
  QuantizeReport report;
  NIBBLE_ASSIGN_OR_RETURN(report.bytes_in, reader.required_int("bytes_in"));
  NIBBLE_ASSIGN_OR_RETURN(report.bytes_out, reader.required_int("bytes_out"));
  NIBBLE_ASSIGN_OR_RETURN(report.snr_db_mean, reader.required_double("snr_db_mean"));
  NIBBLE_ASSIGN_OR_RETURN(report.snr_db_min, reader.required_double("snr_db_min"));
  for (const Json& entry : tensors->as_array()) {
    NIBBLE_ASSIGN_OR_RETURN(QuantizedTensor tensor, tensor_from_json(entry));
    report.tensors.push_back(std::move(tensor));
  }
  return report;
}

Status write_text(const std::string& path, std::string_view text) {
  std::error_code ignored;
  std::filesystem::remove(path, ignored);  // an earlier run may have left it
  NIBBLE_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  NIBBLE_RETURN_IF_ERROR(file.write(text));
  return file.finish();
}

}  // namespace

QuantizeReport make_report(const QuantizePlan& plan,
                           int64_t source_bytes,
                           const std::vector<std::optional<JobRecord>>& records) {
  QuantizeReport report;
  report.bytes_in = source_bytes;
  report.bytes_out = plan.bytes_out;
  for (size_t i = 0; i < plan.jobs.size(); ++i) {
    const PlanJob& job = plan.jobs[i];
    if (job.matrix == nullptr) {
      continue;
    }
    const RowsError& error = records[i]->error;
    report.tensors.push_back({.name = job.name(),
                              .scheme = std::string(job.scheme.name),
                              .source = job.matrix->format(),
                              .n = job.matrix->n(),
                              .k = job.matrix->k(),
                              .bytes_in = job.bytes_in,
                              .bytes_out = job.bytes_out(),
                              .snr_db = error.snr_db(),
                              .cosine = error.cosine(),
                              .max_error = error.max_error,
                              .clipped = error.clipped,
                              .zeros = error.zeros,
                              .scale_low = error.scale_low,
                              .scale_high = error.scale_high,
                              .calibration = records[i]->calibration});
  }
  std::sort(report.tensors.begin(), report.tensors.end(),
            [](const QuantizedTensor& a, const QuantizedTensor& b) {
              return a.snr_db != b.snr_db ? a.snr_db < b.snr_db : a.name < b.name;
            });
  for (const QuantizedTensor& tensor : report.tensors) {
    report.snr_db_mean += tensor.snr_db / static_cast<double>(report.tensors.size());
  }
  if (report.tensors.empty()) {  // an import of plain numbers, which are copied
    report.snr_db_mean = report.snr_db_min = QuantError{}.snr_db();
  } else {
    report.snr_db_min = report.tensors.front().snr_db;
  }
  return report;
}

Status write_report(const QuantizeReport& report,
                    const QuantizePlan& plan,
                    std::string_view model,
                    const std::string& folder) {
  JsonArray tensors;
  for (const QuantizedTensor& tensor : report.tensors) {
    tensors.push_back(tensor_json(tensor));
  }
  const Json json = Json::object({{"nibble_quantization_report", kVersion},
                                  {"model", model},
                                  {"rules", plan.family},
                                  {"totals", Json::object({{"bytes_in", report.bytes_in},
                                                           {"bytes_out", report.bytes_out},
                                                           {"snr_db_mean", report.snr_db_mean},
                                                           {"snr_db_min", report.snr_db_min}})},
                                  {"tensors", std::move(tensors)},
                                  {"plan", plan.hash}});
  NIBBLE_RETURN_IF_ERROR(write_text(folder + "/quantization_report.html", report_html(json)));
  // Last of all: its presence says that everything else is there.
  return write_text(fmt::format("{}/{}", folder, kReportName), json.dump() + "\n");
}

std::optional<QuantizeReport> read_report(const std::string& folder, const std::string& plan_hash) {
  const std::string path = fmt::format("{}/{}", folder, kReportName);
  if (!file_exists(path)) {
    return std::nullopt;
  }
  const auto text = read_file(path);
  if (!text.ok()) {
    return std::nullopt;
  }
  const auto json = Json::parse(*text);
  const Json* plan = json.ok() ? json->find("plan") : nullptr;
  if (plan == nullptr || !plan->is_string() || plan->as_string() != plan_hash) {
    return std::nullopt;
  }
  auto report = report_from_json(*json);
  return report.ok() ? std::optional(std::move(*report)) : std::nullopt;
}

}  // namespace nibble
