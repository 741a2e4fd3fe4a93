#include "quantizer/quantize.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <unordered_map>
#include <utility>

#include <fmt/ranges.h>

#include "base/cpu_topology.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "checkpoint/checkpoint_reader.h"
#include "quantizer/model_files.h"
#include "quantizer/plan_hash.h"
#include "quantizer/recipe.h"
#include "quantizer/work_folder.h"

namespace nibble {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kUsualMemory = int64_t{2} << 30;

Status check_options(const QuantizeOptions& options) {
  if (options.plan.shard_bytes <= 0) {
    return make_error(StatusCode::kInvalidArgument, "--shard-size: {} bytes is not positive",
                      options.plan.shard_bytes);
  }
  const QuantizeShare& share = options.share;
  if (share.parts < 1 || share.part < 1 || share.part > share.parts) {
    return make_error(StatusCode::kInvalidArgument,
                      "--part {}/{}: not of the form I/N with I from 1 to N", share.part,
                      share.parts);
  }
  if (options.maker != nullptr && share.kind != QuantizeShare::Kind::kWhole) {
    return make_error(StatusCode::kInvalidArgument,
                      "--calibrate: layers depend on those before them, so no part can be made by "
                      "itself; leave --part and --finish out");
  }
  std::error_code ignored;
  if (fs::equivalent(options.source, options.destination, ignored)) {
    return make_error(StatusCode::kInvalidArgument, "{}: source and destination are the same",
                      options.source);
  }
  return {};
}

PlanOptions plan_options(const QuantizeOptions& options) {
  PlanOptions plan = options.plan;
  if (options.maker != nullptr) {
    plan.calibration = options.maker->recipe();
  }
  return plan;
}

/// One call of quantize_checkpoint().
class Run final {
 public:
  struct Parts {
    const CheckpointReader& reader;
    const QuantizePlan& plan;
    const Json& recipe;
  };
  Run(const QuantizeOptions& options, const Parts& parts)
      : options_(options),
        reader_(parts.reader),
        plan_(parts.plan),
        recipe_(parts.recipe),
        threads_(options.threads > 0 ? options.threads : usable_cores()),
        memory_(options.memory > 0 ? options.memory : kUsualMemory),
        records_(parts.plan.jobs.size()) {}

  Result<QuantizeReport> run() {
    NIBBLE_ASSIGN_OR_RETURN(destination_, WorkFolder::destination_of(options_.destination));
    NIBBLE_RETURN_IF_ERROR(settle_leftover());
    if (auto report = finished_in(destination_)) {
      NIBBLE_RETURN_IF_ERROR(check_fallbacks(*report, destination_));
      report->already_there = true;
      return std::move(*report);
    }
    if (options_.existing == ExistingOutput::kRefuse && file_exists(destination_)) {
      return make_error(StatusCode::kAlreadyExists,
                        "{}: exists already; choose another name or give --force to replace it",
                        destination_);
    }
    NIBBLE_RETURN_IF_ERROR(check_memory());
    const bool part = options_.share.kind == QuantizeShare::Kind::kPart;
    NIBBLE_ASSIGN_OR_RETURN(
        WorkFolder folder,
        WorkFolder::open(destination_, part ? WorkFolder::Sharing::kWithOtherParts
                                            : WorkFolder::Sharing::kAlone));
    auto report = work_in(folder);
    return report.ok() ? std::move(report)
                       : Result<QuantizeReport>(after_failure(folder, report.status()));
  }

 private:
  // Before anything is created.
  Status check_memory() {
    if (options_.maker != nullptr) {
      const int64_t needed = rss_bytes() + options_.maker->least_memory(plan_, threads_);
      memory_ = options_.memory > 0 ? memory_ : std::max(memory_, needed);
      if (memory_ < needed) {
        constexpr int64_t kMega = int64_t{1} << 20;
        constexpr int64_t kMore = 8;  // what is resident before differs from run to run
        return make_error(StatusCode::kInvalidArgument,
                          "--memory {} MiB is too little to calibrate this model: a layer with the "
                          "sums of its widest input needs {} MiB",
                          memory_ / kMega, needed / kMega + kMore);
      }
    }
    std::vector<size_t> jobs;
    for (const size_t shard : my_shards()) {
      const std::vector<size_t>& more = plan_.shards[shard].jobs;
      jobs.insert(jobs.end(), more.begin(), more.end());
    }
    return plan_memory(plan_, jobs, 1, memory_).status();
  }

  // A replacement that was killed left either the new output or the old one.
  Status settle_leftover() {
    const std::string leftover = WorkFolder::leftover_of(destination_);
    if (!file_exists(leftover)) {
      return {};
    }
    const bool complete = finished_in(leftover).has_value() && !finished_in(destination_);
    if (complete && file_exists(destination_)) {
      return options_.existing == ExistingOutput::kReplace
                 ? exchange_folders(leftover, destination_)
                 : Status();
    }
    NIBBLE_LOG(kWarning, "removing {}, left by an interrupted replacement", leftover);
    std::error_code ignored;
    fs::remove_all(leftover, ignored);
    return {};
  }

  [[nodiscard]] std::optional<QuantizeReport> finished_in(const std::string& folder) const {
    auto report = read_report(folder, plan_.hash);
    for (size_t shard = 0; report && shard < plan_.shards.size(); ++shard) {
      if (!shard_complete(plan_, folder, shard)) {
        report.reset();
      }
    }
    return report;
  }

  Result<QuantizeReport> work_in(WorkFolder& folder) {
    if (options_.share.kind != QuantizeShare::Kind::kPart) {
      if (auto report = finished_in(folder.path())) {  // killed just before the renaming
        NIBBLE_RETURN_IF_ERROR(check_snr(*report, folder));
        NIBBLE_RETURN_IF_ERROR(check_fallbacks(*report, folder.path()));
        NIBBLE_RETURN_IF_ERROR(folder.commit(options_.existing));
        return std::move(*report);
      }
    }
    NIBBLE_RETURN_IF_ERROR(read_journals(folder));
    if (options_.share.kind != QuantizeShare::Kind::kFinish) {
      NIBBLE_RETURN_IF_ERROR(do_share(folder));
    }
    if (options_.share.kind == QuantizeShare::Kind::kPart) {
      return part_report(folder);
    }
    NIBBLE_RETURN_IF_ERROR(check_complete(folder));
    return finish(folder);
  }

  // What all parts have done.
  Status read_journals(WorkFolder& folder) {
    std::unordered_map<std::string, size_t> index;
    for (size_t i = 0; i < plan_.jobs.size(); ++i) {
      index.emplace(plan_.jobs[i].name(), i);
    }
    for (const std::string& name : folder.journals()) {
      NIBBLE_ASSIGN_OR_RETURN(JournalContent content,
                              read_journal(fmt::format("{}/{}", folder.path(), name)));
      if (!content.plan.empty() && content.plan != plan_.hash) {
        NIBBLE_RETURN_IF_ERROR(discard(folder, content));
        records_.assign(plan_.jobs.size(), std::nullopt);
        return {};
      }
      for (auto& [job, record] : content.jobs) {
        if (const auto found = index.find(job); found != index.end()) {
          records_[found->second] = std::move(record);
        }
      }
    }
    return {};
  }

  // Work of another plan is in the way.
  Status discard(WorkFolder& folder, const JournalContent& content) {
    const bool precious = !content.jobs.empty() && options_.existing == ExistingOutput::kRefuse;
    if (precious || options_.share.kind != QuantizeShare::Kind::kWhole) {
      return make_error(
          StatusCode::kInvalidArgument,
          "{}: holds unfinished work with other options, or of a source that changed "
          "since; give the same options to continue it, or delete the folder{}",
          folder.path(),
          options_.share.kind == QuantizeShare::Kind::kWhole ? ", or give --force" : "");
    }
    NIBBLE_LOG(kWarning, "{}: removing unfinished work with other options", folder.path());
    return folder.clear();
  }

  [[nodiscard]] std::vector<int64_t> shard_weights() const {
    std::vector<int64_t> weights;
    for (const PlannedShard& shard : plan_.shards) {
      weights.push_back(shard.file_bytes);
      for (const size_t job : shard.jobs) {
        weights.back() += plan_.jobs[job].bytes_in;
      }
    }
    return weights;
  }

  [[nodiscard]] std::vector<size_t> my_shards() const {
    return shards_of_part(shard_weights(), options_.share.part, options_.share.parts);
  }

  Status do_share(const WorkFolder& folder) {
    const std::vector<size_t> shards = my_shards();
    const std::string path = fmt::format("{}/{}", folder.path(),
                                         journal_name(options_.share.part, options_.share.parts));
    JournalContent content;
    NIBBLE_ASSIGN_OR_RETURN(Journal journal, Journal::open(path, plan_.hash, content));
    NIBBLE_ASSIGN_OR_RETURN(const auto store, ShardStore::open(plan_, folder.path(), shards,
                                                               journal, records_, threads_));
    PipelineOptions pipeline;
    NIBBLE_ASSIGN_OR_RETURN(pipeline.budget,
                            plan_memory(plan_, store->jobs_to_do(), threads_, memory_));
    pipeline.stop = options_.stop;
    pipeline.progress = options_.progress;
    for (const size_t shard : shards) {
      for (const size_t job : plan_.shards[shard].jobs) {
        pipeline.begin.bytes_total += plan_.jobs[job].bytes_in;
        ++pipeline.begin.tensors_total;
        if (records_[job]) {
          pipeline.begin.bytes_done += plan_.jobs[job].bytes_in;
          ++pipeline.begin.tensors_done;
        }
      }
    }
    pipeline.begin.bytes_before = pipeline.begin.bytes_done;
    if (options_.maker != nullptr) {
      NIBBLE_RETURN_IF_ERROR(make_jobs(folder, *store, pipeline));
    }
    return run_pipeline(reader_, plan_, *store, pipeline);
  }

  // Those of the maker; what the pipeline then finds done is added to its progress.
  Status make_jobs(const WorkFolder& folder, ShardStore& store, PipelineOptions& pipeline) {
    const std::vector<size_t> before = store.jobs_to_do();
    NIBBLE_RETURN_IF_ERROR(options_.maker->make({.reader = reader_,
                                                 .plan = plan_,
                                                 .store = store,
                                                 .folder = folder.path(),
                                                 .threads = pipeline.budget.threads,
                                                 .memory = memory_,
                                                 .stop = options_.stop,
                                                 .progress = options_.progress,
                                                 .begin = pipeline.begin}));
    for (const size_t job : before) {
      if (store.done(job)) {
        pipeline.begin.bytes_done += plan_.jobs[job].bytes_in;
        ++pipeline.begin.tensors_done;
      }
    }
    return {};
  }

  QuantizeReport part_report(const WorkFolder& folder) const {
    QuantizeReport report;
    report.shards_total = static_cast<int64_t>(plan_.shards.size());
    for (const size_t shard : my_shards()) {
      report.shards_done += shard_complete(plan_, folder.path(), shard) ? 1 : 0;
      report.bytes_out += plan_.shards[shard].file_bytes;
      for (const size_t job : plan_.shards[shard].jobs) {
        report.bytes_in += plan_.jobs[job].bytes_in;
      }
    }
    return report;
  }

  // All files and all records are there. kUnavailable names the parts that are not done.
  [[nodiscard]] Status check_complete(const WorkFolder& folder) const {
    std::vector<size_t> missing;
    for (size_t shard = 0; shard < plan_.shards.size(); ++shard) {
      const std::vector<size_t>& jobs = plan_.shards[shard].jobs;
      if (!shard_complete(plan_, folder.path(), shard) ||
          !std::all_of(jobs.begin(), jobs.end(),
                       [&](size_t job) { return records_[job].has_value(); })) {
        missing.push_back(shard);
      }
    }
    if (missing.empty()) {
      return {};
    }
    return make_error(
        StatusCode::kUnavailable,
        "{}: {} of {} weight files are missing, the first is {}{}; run the parts that "
        "make them, then --finish again",
        folder.path(), missing.size(), plan_.shards.size(), plan_.shards[missing.front()].name,
        parts_of(missing, folder));
  }

  // ": part 2/4 lacks 3 files, part 4/4 lacks 1 files", as the journals are divided.
  [[nodiscard]] std::string parts_of(const std::vector<size_t>& missing,
                                     const WorkFolder& folder) const {
    int parts = 1;
    for (const std::string& name : folder.journals()) {
      int part = 0;
      int of = 0;
      if (std::sscanf(name.c_str(), "journal-%d-of-%d.jsonl", &part, &of) == 2) {
        parts = std::max(parts, of);
      }
    }
    std::string text;
    for (int part = 1; parts > 1 && part <= parts; ++part) {
      const std::vector<size_t> own = shards_of_part(shard_weights(), part, parts);
      const auto count = std::count_if(missing.begin(), missing.end(), [&](size_t shard) {
        return std::binary_search(own.begin(), own.end(), shard);
      });
      if (count > 0) {
        text += fmt::format("{} part {}/{} lacks {}", text.empty() ? ":" : ",", part, parts, count);
      }
    }
    return text;
  }

  Result<QuantizeReport> finish(WorkFolder& folder) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string hash,
                            plan_hash(plan_, reader_, options_.plan.scale_rule));
    if (hash != plan_.hash) {
      return make_error(StatusCode::kCorrupt, "{}: changed while it was read; start again",
                        options_.source);
    }
    NIBBLE_RETURN_IF_ERROR(write_weight_index(plan_, folder.path()));
    NIBBLE_RETURN_IF_ERROR(copy_model_files(options_.source, folder.path()));
    NIBBLE_RETURN_IF_ERROR(write_config(options_.source, folder.path(), plan_));
    if (options_.maker != nullptr) {
      NIBBLE_RETURN_IF_ERROR(options_.maker->complete(plan_, folder.path()));
    }
    NIBBLE_RETURN_IF_ERROR(write_recipe(recipe_, folder.path()));
    QuantizeReport report = make_report(plan_, reader_.total_bytes(), records_);
    const std::string& name = options_.source_name.empty() ? options_.source : options_.source_name;
    const std::string source = WorkFolder::destination_of(name).value();
    NIBBLE_RETURN_IF_ERROR(write_report(report, plan_, file_name(source), folder.path()));
    NIBBLE_RETURN_IF_ERROR(check_snr(report, folder));
    NIBBLE_RETURN_IF_ERROR(check_fallbacks(report, folder.path()));
    NIBBLE_RETURN_IF_ERROR(folder.commit(options_.existing));
    return report;
  }

  [[nodiscard]] Status check_fallbacks(const QuantizeReport& report,
                                       const std::string& folder) const {
    constexpr size_t kNamed = 8;
    std::vector<std::string> found;
    for (const QuantizedTensor& tensor : report.tensors) {
      if (tensor.calibration && !tensor.calibration->fallback.empty()) {
        found.push_back(fmt::format("{} ({})", tensor.name, tensor.calibration->fallback));
      }
    }
    if (options_.fallbacks == Fallbacks::kRecorded || found.empty()) {
      return {};
    }
    std::ranges::sort(found);
    const size_t more = found.size() - std::min(found.size(), kNamed);
    found.resize(found.size() - more);
    return make_error(
        StatusCode::kInvalidArgument,
        "--strict: the method could not be applied to {} matrices: {}{}; give a longer text "
        "against "
        "few rows, leave the others as they are with --rule NAME=keep, or leave --strict out; all "
        "are listed in {}/{}",
        found.size() + more, fmt::join(found, ", "),
        more > 0 ? fmt::format(" and {} more", more) : "", folder, kReportName);
  }

  [[nodiscard]] Status check_snr(const QuantizeReport& report, const WorkFolder& folder) const {
    if (options_.min_snr_db <= 0 || report.snr_db_min >= options_.min_snr_db) {
      return {};
    }
    const auto below = std::count_if(
        report.tensors.begin(), report.tensors.end(),
        [&](const QuantizedTensor& tensor) { return tensor.snr_db < options_.min_snr_db; });
    return make_error(
        StatusCode::kInvalidArgument,
        "--min-snr {}: {} tensors are below it, the worst is {} with {:.2f} dB; {} was "
        "not made, all are listed in {}/{}",
        options_.min_snr_db, below, report.tensors.front().name, report.snr_db_min, destination_,
        folder.path(), kReportName);
  }

  // Says how to go on; work that nobody can go on with is removed.
  Status after_failure(WorkFolder& folder, const Status& status) const {
    const StatusCode code = status.code();
    if (code == StatusCode::kResourceExhausted || code == StatusCode::kCancelled ||
        code == StatusCode::kIo) {
      return Status(code, fmt::format("{}; what is done is kept in {}, and the same command "
                                      "continues there",
                                      status.message(), folder.path()));
    }
    const bool whole = options_.share.kind == QuantizeShare::Kind::kWhole;
    if (whole && (code == StatusCode::kCorrupt || holds_nothing(folder))) {
      folder.remove();
    }
    return status;
  }

  /// Whether nothing in a work folder is worth keeping: a refusal came before the work.
  static bool holds_nothing(const WorkFolder& folder) {
    const std::vector<std::string> journals = folder.journals();
    return !file_exists(fmt::format("{}/{}", folder.path(), kChoiceName)) &&
           std::ranges::all_of(journals, [&](const std::string& name) {
             const auto content = read_journal(fmt::format("{}/{}", folder.path(), name));
             return content.ok() && content->jobs.empty() && content->shards.empty();
           });
  }

  const QuantizeOptions& options_;
  const CheckpointReader& reader_;
  const QuantizePlan& plan_;
  const Json& recipe_;
  int threads_;
  int64_t memory_;
  std::string destination_;
  std::vector<std::optional<JobRecord>> records_;
};

}  // namespace

Result<QuantizeReport> quantize_checkpoint(const QuantizeOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_ASSIGN_OR_RETURN(const Json config, read_config(options.source));
  NIBBLE_RETURN_IF_ERROR(check_model_files(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan,
                          make_plan(reader, config, plan_options(options)));
  NIBBLE_ASSIGN_OR_RETURN(const Json recipe, recipe_of(plan_options(options)));
  NIBBLE_ASSIGN_OR_RETURN(QuantizeReport report, Run(options, {reader, plan, recipe}).run());
  report.peak_rss_bytes = peak_rss_bytes();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

Result<Json> describe_plan(const QuantizeOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_ASSIGN_OR_RETURN(const Json config, read_config(options.source));
  NIBBLE_RETURN_IF_ERROR(check_model_files(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const QuantizePlan plan,
                          make_plan(reader, config, plan_options(options)));
  JsonArray tensors;
  for (const PlanJob& job : plan.jobs) {
    JsonArray shape;
    for (const int64_t dim : job.matrix != nullptr
                                 ? std::vector<int64_t>{job.matrix->n(), job.matrix->k()}
                                 : job.tensor->shape) {
      shape.emplace_back(dim);
    }
    tensors.push_back(Json::object(
        {{"name", job.name()},
         {"action", job.matrix != nullptr ? job.scheme.name : std::string_view("keep")},
         {"rule", job.rule},
         {"source", job.matrix != nullptr ? job.matrix->format()
                                          : std::string(dtype_name(job.tensor->dtype))},
         {"shape", std::move(shape)},
         {"bytes_in", job.bytes_in},
         {"bytes_out", job.bytes_out()},
         {"file", plan.shards[job.shard].name}}));
  }
  return Json::object({{"rules", plan.family},
                       {"shards", static_cast<int64_t>(plan.shards.size())},
                       {"bytes_in", reader.total_bytes()},
                       {"bytes_out", plan.bytes_out},
                       {"tensors", std::move(tensors)}});
}

}  // namespace nibble
