#include "quantizer/quantize.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/cpu_topology.h"
#include "base/f16.h"
#include "base/process.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/linear_reader.h"
#include "quantizer/encoder.h"
#include "quantizer/model_files.h"

namespace nibble {
namespace {

constexpr std::string_view kWeightSuffix = ".weight";
constexpr int64_t kRowsPerTask = 16;

/// What becomes of one tensor of the source.
struct Step {
  const TensorInfo* tensor = nullptr;
  std::string module;             // empty: copied byte for byte
  std::vector<TensorSlot> slots;  // of the quantized module
};

struct Plan {
  std::vector<Step> steps;
  std::vector<std::string> ignore;  // linear modules that stay as they are
};

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// "a.b" of a floating-point matrix "a.b.weight"; empty otherwise.
std::string_view matrix_module(const TensorInfo& tensor) {
  const std::string_view name = tensor.name;
  const bool weight = name.size() > kWeightSuffix.size() &&
                      name.substr(name.size() - kWeightSuffix.size()) == kWeightSuffix;
  if (!weight || tensor.shape.size() != 2 || tensor.elements() == 0 || !is_float(tensor.dtype)) {
    return {};
  }
  return name.substr(0, name.size() - kWeightSuffix.size());
}

std::string_view last_component(std::string_view module) {
  return module.substr(module.find_last_of('.') + 1);  // npos + 1 is 0
}

bool is_embedding(std::string_view module) {
  const std::string_view last = last_component(module);
  return last.find("embed") != std::string_view::npos || last == "wte" || last == "wpe";
}

class Selector final {
 public:
  explicit Selector(const QuantizeOptions& options)
      : options_(options),
        ignore_used_(options.ignore.size()),
        include_used_(options.include.size()) {}

  /// Whether a module is quantized; remembers which patterns were of use.
  Result<bool> selects(std::string_view module) {
    NIBBLE_ASSIGN_OR_RETURN(const bool ignored,
                            any("--ignore", options_.ignore, ignore_used_, module));
    NIBBLE_ASSIGN_OR_RETURN(const bool included,
                            any("--include", options_.include, include_used_, module));
    if (ignored && included) {
      return make_error(StatusCode::kInvalidArgument, "module {} is both ignored and included",
                        module);
    }
    return !ignored && (included || quantizable_by_default(module));
  }

  /// kInvalidArgument for a pattern that matched nothing.
  [[nodiscard]] Status check_all_used() const {
    NIBBLE_RETURN_IF_ERROR(check_used(options_.ignore, ignore_used_, "--ignore"));
    return check_used(options_.include, include_used_, "--include");
  }

 private:
  static Result<bool> any(std::string_view flag,
                          const std::vector<std::string>& patterns,
                          std::vector<bool>& used,
                          std::string_view module) {
    bool found = false;
    for (size_t i = 0; i < patterns.size(); ++i) {
      const auto match = matches_module(patterns[i], module);
      if (!match.ok()) {
        return match.status().with_context(fmt::format("{} {}", flag, patterns[i]));
      }
      if (*match) {
        used[i] = true;
        found = true;
      }
    }
    return found;
  }

  static Status check_used(const std::vector<std::string>& patterns,
                           const std::vector<bool>& used,
                           std::string_view flag) {
    for (size_t i = 0; i < patterns.size(); ++i) {
      if (!used[i]) {
        return make_error(StatusCode::kInvalidArgument,
                          "{} {}: matches no module; give a module's full name or \"re:PATTERN\"",
                          flag, patterns[i]);
      }
    }
    return {};
  }

  const QuantizeOptions& options_;
  std::vector<bool> ignore_used_;
  std::vector<bool> include_used_;
};

Status check_group(const CheckpointReader& reader,
                   const TensorInfo& tensor,
                   const QuantizeOptions& options) {
  const WeightFormat& format = options.scheme.weight;
  if (format.scale_per == ScalePer::kGroup && tensor.shape[1] % format.group_size != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{}: {} input channels are no multiple of the group size {} of {}; leave the "
                      "module out with --ignore or choose another scheme",
                      reader.where(tensor), tensor.shape[1], format.group_size,
                      options.scheme.name);
  }
  return {};
}

Result<Plan> make_plan(const CheckpointReader& reader, const QuantizeOptions& options) {
  Plan plan;
  Selector selector(options);
  bool head_seen = false;
  for (const TensorInfo* tensor : reader.tensors()) {
    Step step{tensor, {}, {}};
    const std::string_view module = matrix_module(*tensor);
    if (!module.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(const bool selected, selector.selects(module));
      head_seen = head_seen || last_component(module) == "lm_head";
      if (selected) {
        NIBBLE_RETURN_IF_ERROR(check_group(reader, *tensor, options));
        step.module = module;
        step.slots = linear_slots(options.scheme, tensor->shape[0], tensor->shape[1]);
      } else if (!is_embedding(module)) {
        plan.ignore.emplace_back(module);
      }
    }
    plan.steps.push_back(std::move(step));
  }
  NIBBLE_RETURN_IF_ERROR(selector.check_all_used());
  if (!head_seen) {
    plan.ignore.emplace_back("lm_head");  // tied to the embedding, yet a Linear to loaders
  }
  const bool any = std::any_of(plan.steps.begin(), plan.steps.end(),
                               [](const Step& step) { return !step.module.empty(); });
  if (!any) {
    return make_error(StatusCode::kInvalidArgument, "{}: no module is left to quantize",
                      options.source);
  }
  return plan;
}

std::vector<TensorPlan> output_tensors(const Plan& plan) {
  std::vector<TensorPlan> tensors;
  for (const Step& step : plan.steps) {
    if (step.module.empty()) {
      tensors.push_back({step.tensor->name, step.tensor->dtype, step.tensor->shape, 0});
    }
    for (const TensorSlot& slot : step.slots) {
      tensors.push_back(
          {fmt::format("{}.{}", step.module, slot.suffix), slot.dtype, slot.shape, 0});
    }
  }
  return tensors;
}

// One row as f32; false if a weight is not finite.
bool load_row(const TensorInfo& tensor, int64_t row, std::span<float> out) {
  const int64_t k = tensor.shape[1];
  const int64_t width = dtype_bits(tensor.dtype) / 8;
  const std::byte* data = tensor.data.data() + row * k * width;
  if (tensor.dtype == DType::kF32) {
    std::memcpy(out.data(), data, static_cast<size_t>(k) * 4);
  } else {
    for (int64_t i = 0; i < k; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, data + i * 2, 2);
      out[static_cast<size_t>(i)] =
          tensor.dtype == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
  }
  return std::all_of(out.begin(), out.end(), [](float value) { return std::isfinite(value); });
}

struct Quantized {
  QuantTensor weight;
  QuantError error;
};

/// Rows are shared out over threads; sums are taken in row order afterwards.
Result<Quantized> quantize_matrix(const CheckpointReader& reader,
                                  const TensorInfo& tensor,
                                  const QuantizeOptions& options,
                                  int threads) {
  const int64_t n = tensor.shape[0];
  const int64_t k = tensor.shape[1];
  Quantized result;
  NIBBLE_ASSIGN_OR_RETURN(result.weight, QuantTensor::allocate(options.scheme.weight, n, k));
  std::vector<QuantError> errors(static_cast<size_t>(n));
  std::atomic<int64_t> next_row{0};
  std::atomic<int64_t> bad_row{-1};
  const auto work = [&] {
    std::vector<float> row_values(static_cast<size_t>(k));
    const int64_t groups = options.scheme.weight.groups(k);
    for (int64_t begin = next_row.fetch_add(kRowsPerTask); begin < n && bad_row < 0;
         begin = next_row.fetch_add(kRowsPerTask)) {
      for (int64_t row = begin; row < std::min(n, begin + kRowsPerTask); ++row) {
        if (!load_row(tensor, row, row_values)) {
          bad_row = row;
          return;
        }
        errors[static_cast<size_t>(row)] =
            quantize_row(options.scheme.weight, options.rule, row_values,
                         result.weight.scales.as<float>().data() + row * groups,
                         result.weight.codes.data() + row * result.weight.row_bytes());
      }
    }
  };
  std::vector<std::thread> workers;
  const auto useful = std::min<int64_t>(threads, (n + kRowsPerTask - 1) / kRowsPerTask);
  for (int64_t i = 1; i < useful; ++i) {
    workers.emplace_back(work);
  }
  work();
  for (std::thread& worker : workers) {
    worker.join();
  }
  if (bad_row >= 0) {
    return make_error(StatusCode::kCorrupt,
                      "{}: row {} holds NaN or infinity; leave the module out with --ignore",
                      reader.where(tensor), bad_row.load());
  }
  for (const QuantError& error : errors) {
    result.error.signal += error.signal;
    result.error.noise += error.noise;
  }
  return result;
}

Result<QuantizedTensor> run_step(const CheckpointReader& reader,
                                 const Step& step,
                                 const QuantizeOptions& options,
                                 CheckpointWriter& writer) {
  QuantizedTensor report;
  report.name = step.module;
  report.bytes_in = static_cast<int64_t>(step.tensor->data.size());
  if (step.module.empty()) {
    report.bytes_out = report.bytes_in;
    NIBBLE_RETURN_IF_ERROR(writer.write(step.tensor->name, step.tensor->data));
    return report;
  }
  const int threads = options.threads > 0 ? options.threads : usable_cores();
  NIBBLE_ASSIGN_OR_RETURN(const Quantized result,
                          quantize_matrix(reader, *step.tensor, options, threads));
  for (const TensorSlot& slot : step.slots) {
    NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, slot_bytes(slot, result.weight));
    NIBBLE_RETURN_IF_ERROR(writer.write(fmt::format("{}.{}", step.module, slot.suffix), bytes));
    report.bytes_out += static_cast<int64_t>(bytes.size());
  }
  report.snr_db = result.error.snr_db();
  return report;
}

void summarize(QuantizeReport& report) {
  std::sort(report.tensors.begin(), report.tensors.end(),
            [](const QuantizedTensor& a, const QuantizedTensor& b) {
              return a.snr_db != b.snr_db ? a.snr_db < b.snr_db : a.name < b.name;
            });
  for (const QuantizedTensor& tensor : report.tensors) {
    report.snr_db_mean += tensor.snr_db / static_cast<double>(report.tensors.size());
  }
  report.snr_db_min = report.tensors.front().snr_db;
  report.peak_rss_bytes = peak_rss_bytes();
}

Status check_options(const QuantizeOptions& options) {
  if (!options.scheme.weight.quantized()) {
    return make_error(StatusCode::kInvalidArgument, "scheme {} does not quantize; choose another",
                      options.scheme.name);
  }
  NIBBLE_RETURN_IF_ERROR(make_encoder({.scheme = options.scheme}, 1, int64_t{1} << 20).status());
  if (options.shard_bytes <= 0) {
    return make_error(StatusCode::kInvalidArgument, "--shard-size: {} bytes is not positive",
                      options.shard_bytes);
  }
  std::error_code ignored;
  if (std::filesystem::equivalent(options.source, options.destination, ignored)) {
    return make_error(StatusCode::kInvalidArgument, "{}: source and destination are the same",
                      options.source);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(options.source + "/config.json"));
  const auto config = Json::parse(text);
  if (!config.ok()) {
    return config.status().with_context("config.json");
  }
  const Json* nested = config->find("text_config");
  if (config->find("quantization_config") != nullptr ||
      (nested != nullptr && nested->find("quantization_config") != nullptr)) {
    return make_error(StatusCode::kUnsupported,
                      "{}: has a quantization_config already; start from the unquantized model",
                      options.source);
  }
  return {};
}

}  // namespace

bool quantizable_by_default(std::string_view module) {
  const std::string_view last = last_component(module);
  return !is_embedding(module) && last.find("norm") == std::string_view::npos &&
         last != "lm_head" && last != "gate" && last != "router" && last != "shared_expert_gate" &&
         last != "classifier" && last != "score";
}

Result<QuantizeReport> quantize_checkpoint(const QuantizeOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, make_plan(reader, options));
  NIBBLE_ASSIGN_OR_RETURN(OutputFolder folder,
                          OutputFolder::create(options.destination, options.existing));
  NIBBLE_ASSIGN_OR_RETURN(
      CheckpointWriter writer,
      CheckpointWriter::create(folder.path(), output_tensors(plan), options.shard_bytes));
  QuantizeReport report;
  report.bytes_in = reader.total_bytes();
  int64_t done = 0;
  for (const Step& step : plan.steps) {
    NIBBLE_ASSIGN_OR_RETURN(QuantizedTensor tensor, run_step(reader, step, options, writer));
    reader.drop_pages(*step.tensor);
    done += tensor.bytes_in;
    if (options.progress) {
      options.progress({done, report.bytes_in, step.tensor->name});
    }
    if (!step.module.empty()) {
      report.tensors.push_back(std::move(tensor));
    }
  }
  NIBBLE_RETURN_IF_ERROR(writer.finish());
  NIBBLE_RETURN_IF_ERROR(copy_model_files(options.source, folder.path()));
  NIBBLE_RETURN_IF_ERROR(
      write_config(options.source, folder.path(), quant_config_json(options.scheme, plan.ignore)));
  NIBBLE_RETURN_IF_ERROR(folder.commit());
  report.bytes_out = writer.bytes_written();
  summarize(report);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

}  // namespace nibble
