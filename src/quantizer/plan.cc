#include "quantizer/plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "base/check.h"
#include "checkpoint/gguf_matrix.h"
#include "checkpoint/kv_scales.h"
#include "gguf/split.h"
#include "quantizer/own_head.h"
#include "quantizer/plan_checks.h"
#include "quantizer/plan_config.h"
#include "quantizer/plan_hash.h"

namespace nibble {
namespace {

constexpr int64_t kChunkBytes = int64_t{2} << 20;  // of a matrix in BF16
// Of a passed tensor: hashed, then copied while it is in the cache.
constexpr int64_t kCopyBytes = int64_t{1} << 20;
constexpr int64_t kManyRows = 128;
constexpr int64_t kFewRows = 8;

int64_t chunk_rows_of(const MatrixEncoder& encoder, int64_t k) {
  const int64_t wanted = kChunkBytes / (2 * k);
  const int64_t step = std::max(encoder.row_block(), wanted >= kManyRows ? kManyRows : kFewRows);
  return std::max(step, wanted / step * step);
}

}  // namespace

int64_t PlanJob::bytes_out() const {
  int64_t sum = 0;
  for (const PlannedTensor& output : outputs) {
    sum += output.tensor.bytes;
  }
  return sum;
}

int64_t PlanJob::chunk_count() const {
  const int64_t units = matrix != nullptr ? matrix->n() : outputs[0].tensor.bytes;
  return std::max<int64_t>(1, (units + chunk_rows_ - 1) / chunk_rows_);
}

PlanJob::Range PlanJob::chunk(int64_t index) const {
  const int64_t units = matrix != nullptr ? matrix->n() : outputs[0].tensor.bytes;
  const int64_t begin = index * chunk_rows_;
  return {begin, std::min(chunk_rows_, units - begin)};
}

MatrixEncoder::Place PlanJob::place(size_t output, int64_t chunk_index) const {
  const Range range = chunk(chunk_index);
  return matrix != nullptr ? encoder->place(output, range.begin, range.count)
                           : MatrixEncoder::Place{range.begin, range.count};
}

std::vector<std::span<const std::byte>> PlanJob::touched(int64_t chunk_index) const {
  if (scattered) {
    return chunk_index == 0 ? matrix->touched(0, matrix->n())
                            : std::vector<std::span<const std::byte>>();
  }
  const Range range = chunk(chunk_index);
  if (matrix != nullptr) {
    return matrix->touched(range.begin, range.count);
  }
  return {tensor->data.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.count))};
}

std::string QuantizePlan::header(size_t shard) const {
  std::vector<const PlannedTensor*> tensors;
  for (const size_t job : shards[shard].jobs) {
    for (const PlannedTensor& output : jobs[job].outputs) {
      tensors.push_back(&output);
    }
  }
  return shard_header(tensors);
}

/// Makes a plan step by step.
class Planner final {
 public:
  Planner(const CheckpointReader& reader, const Json& config, const PlanOptions& options)
      : reader_(reader), config_(config), options_(options) {}

  Result<QuantizePlan> run() {
    NIBBLE_ASSIGN_OR_RETURN(plan_.source, list_source_matrices(reader_, config_));
    NIBBLE_RETURN_IF_ERROR(find_head());
    NIBBLE_RETURN_IF_ERROR(decide_all());
    NIBBLE_RETURN_IF_ERROR(check_decisions(decided_));
    NIBBLE_RETURN_IF_ERROR(check_calibrated());
    NIBBLE_RETURN_IF_ERROR(add_jobs());
    NIBBLE_RETURN_IF_ERROR(check_anything_encoded());
    share_extents();
    NIBBLE_RETURN_IF_ERROR(place_outputs());
    NIBBLE_ASSIGN_OR_RETURN(plan_.quantization_config,
                            written_config(decided_, dialect_, announced_cache(), config_));
    NIBBLE_ASSIGN_OR_RETURN(plan_.hash, plan_hash(plan_, reader_, options_.scale_rule));
    return std::move(plan_);
  }

 private:
  // A head that is given a scheme becomes a matrix of its own.
  Status find_head() {
    if (!options_.rules.head) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(tied_head_, add_tied_head(reader_, config_, plan_.source));
    plan_.own_head = options_.rules.head->weight.quantized();
    if (tied_head_ == nullptr || plan_.own_head) {
      return {};
    }
    return make_error(StatusCode::kInvalidArgument,
                      "--lm-head {}: the head of {} is the table of its embeddings, which stays as "
                      "it is; leave --lm-head out",
                      options_.rules.head->name, reader_.path());
  }

  // Weights alone do not tell which blocks of a row need 8 bits.
  Status check_calibrated() {
    for (const DecidedMatrix& decided : decided_) {
      const auto& scheme = decided.decision.scheme;
      if (scheme && in_blocks(scheme->act) && options_.calibration.is_null()) {
        return make_error(
            StatusCode::kInvalidArgument,
            "{}: {} chooses which channels have more bits by what a text shows of them; "
            "give one with --calibrate TEXT, or choose another --scheme",
            decided.matrix->module(), scheme->name);
      }
    }
    return {};
  }

  Status decide_all() {
    NIBBLE_ASSIGN_OR_RETURN(RuleSet rules, RuleSet::create(options_.rules, config_));
    plan_.family = rules.family();
    plan_.calibration = options_.calibration;
    for (const auto& matrix : plan_.source.matrices) {
      NIBBLE_ASSIGN_OR_RETURN(Decision decision, rules.decide(matrix->module()));
      DecidedMatrix decided{matrix.get(), rules.kind(matrix->module()), std::move(decision), false};
      auto& scheme = decided.decision.scheme;
      const bool gguf = lies_as_in_gguf(*matrix->tensors().front());  // which no folder can hold
      if (gguf && !scheme) {
        NIBBLE_ASSIGN_OR_RETURN(scheme, find_scheme("bf16"));
        decided.decision.rule += ", decoded";
      }
      decided.encoded = scheme && (scheme->weight.quantized() || gguf || !is_plain_source(*matrix));
      decided_.push_back(std::move(decided));
    }
    return rules.check_all_used();
  }

  Status add_jobs() {
    for (const DecidedMatrix& decided : decided_) {
      NIBBLE_RETURN_IF_ERROR(decided.encoded ? add_encoded(decided) : add_kept(decided));
    }
    for (const TensorInfo* tensor : plan_.source.others) {
      add_passed(*tensor, {});
    }
    for (const TensorInfo* tensor : consumed_) {
      if (passed_.count(tensor) != 0) {
        return make_error(StatusCode::kInvalidArgument,
                          "{}: holds matrices that are quantized and others that stay; write rules "
                          "that name all of them",
                          reader_.where(*tensor));
      }
    }
    sort_jobs();
    return {};
  }

  Status add_encoded(const DecidedMatrix& decided) {
    const SourceMatrix& matrix = *decided.matrix;
    const QuantScheme& scheme = *decided.decision.scheme;
    NIBBLE_RETURN_IF_ERROR(choose_dialect(decided));
    const auto encoder = encoder_for(scheme, matrix.n(), matrix.k());
    NIBBLE_RETURN_IF_ERROR(encoder.status().with_context(matrix.where()));
    PlanJob job;
    job.matrix = &matrix;
    job.encoder = *encoder;
    job.scheme = scheme;
    job.rule = decided.decision.rule;
    job.chunk_rows_ = chunk_rows_of(**encoder, matrix.k());
    job.bytes_in = bytes_of(matrix.touched(0, matrix.n()));
    job.scattered =
        bytes_of(job.touched(0)) * job.chunk_count() > 2 * job.bytes_in && job.chunk_count() > 1;
    for (const TensorSlot& slot : (*encoder)->slots()) {
      const std::string name = fmt::format("{}.{}", matrix.module(), slot.suffix);
      job.outputs.push_back({{name, slot.dtype, slot.shape, 0}, 0});
    }
    if (&matrix != tied_head_) {  // whose table stays
      consumed_.insert(matrix.tensors().begin(), matrix.tensors().end());
    }
    plan_.jobs.push_back(std::move(job));
    return {};
  }

  Status choose_dialect(const DecidedMatrix& decided) {
    const QuantScheme& scheme = *decided.decision.scheme;
    if (!scheme.weight.quantized()) {
      return {};
    }
    const Dialect own = options_.dialect.value_or(
        source_transforms(config_).is_null() ? default_dialect(scheme)
                                             : Dialect::kCompressedTensors);  // which can say so
    if (dialect_.value_or(own) != own) {
      return make_error(
          StatusCode::kUnsupported,
          "{} becomes {} ({}), which is written as {}, but other modules need {}: one "
          "folder has one of the two; choose other schemes, or one --format for all",
          decided.matrix->module(), scheme.name, decided.decision.rule, dialect_name(own),
          dialect_name(*dialect_));
    }
    dialect_ = own;
    return check_words(*decided.matrix);
  }

  // Quark's files hold whole words of codes and no shape: readers could not tell 100 columns from
  // 104.
  [[nodiscard]] Status check_words(const SourceMatrix& matrix) const {
    constexpr int64_t kCodesPerWord = 8;
    if (dialect_ != Dialect::kQuark || matrix.k() % kCodesPerWord == 0) {
      return {};
    }
    return make_error(
        StatusCode::kUnsupported,
        "{}: {} input channels are no multiple of {}, and format {} stores whole words "
        "of codes without the shape; choose --format {}, or leave the module out with "
        "--ignore",
        matrix.where(), matrix.k(), kCodesPerWord, dialect_name(*dialect_),
        dialect_name(Dialect::kCompressedTensors));
  }

  Result<const MatrixEncoder*> encoder_for(const QuantScheme& scheme, int64_t n, int64_t k) {
    const auto key = std::tuple(std::string(scheme.name), n, k);
    if (const auto found = encoders_.find(key); found != encoders_.end()) {
      return found->second;
    }
    EncoderOptions options{.scheme = scheme, .rule = options_.scale_rule};
    options.dialect = scheme.weight.quantized() && dialect_ ? *dialect_ : default_dialect(scheme);
    NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<MatrixEncoder> encoder, make_encoder(options, n, k));
    plan_.encoders.push_back(std::move(encoder));
    return encoders_.emplace(key, plan_.encoders.back().get()).first->second;
  }

  Status add_kept(const DecidedMatrix& decided) {
    for (const TensorInfo* tensor : decided.matrix->tensors()) {
      add_passed(*tensor, decided.decision.rule);
    }
    return {};
  }

  void add_passed(const TensorInfo& tensor, const std::string& rule) {
    if (!passed_.insert(&tensor).second) {
      return;
    }
    PlanJob job;
    job.tensor = &tensor;
    job.rule = rule;
    job.chunk_rows_ = kCopyBytes;
    job.bytes_in = static_cast<int64_t>(tensor.data.size());
    job.outputs.push_back({{tensor.name, tensor.dtype, tensor.shape, 0}, 0});
    plan_.jobs.push_back(std::move(job));
  }

  void sort_jobs() {
    std::unordered_map<const TensorInfo*, size_t> position;
    for (const TensorInfo* tensor : reader_.tensors()) {
      position.emplace(tensor, position.size());
    }
    const auto place = [&](const PlanJob& job) {
      return position.at(job.matrix != nullptr ? job.matrix->tensors().front() : job.tensor);
    };
    std::stable_sort(plan_.jobs.begin(), plan_.jobs.end(),
                     [&](const PlanJob& a, const PlanJob& b) { return place(a) < place(b); });
  }

  // Other dialects have scales without a word about them.
  [[nodiscard]] KvCacheScheme announced_cache() const {
    const bool stored = std::ranges::any_of(
        plan_.source.others, [](const TensorInfo* tensor) { return is_kv_scale(tensor->name); });
    const bool says = dialect_.value_or(Dialect::kCompressedTensors) == Dialect::kCompressedTensors;
    return options_.kv_cache.value_or(stored && says ? KvCacheScheme::kFp8 : KvCacheScheme::kNone);
  }

  [[nodiscard]] Status check_anything_encoded() const {
    const bool any = std::any_of(decided_.begin(), decided_.end(),
                                 [](const DecidedMatrix& matrix) { return matrix.encoded; });
    const QuantScheme& scheme = options_.rules.scheme;
    const bool imports = !scheme.weight.quantized() && gguf::is_gguf_path(reader_.path());
    if (!any && !imports) {  // a GGUF file becomes a folder, whatever it holds
      return make_error(
          StatusCode::kInvalidArgument, "{}: no module is left to quantize{}", reader_.path(),
          scheme.weight.quantized()
              ? std::string()
              : fmt::format("; {} decodes what is quantized, and nothing is", scheme.name));
    }
    return {};
  }

  // Fused layers of a scheme with one scale for a matrix take one scale together: loaders keep one
  // for the fused matrix. The first of two stages of scales may differ, as AMD Quark's does.
  static std::string extent_key(const PlanJob& job) {
    const bool shares = job.scheme.weight.scale_per == ScalePer::kTensor;
    const std::string fused = shares ? fused_set(job.name()) : std::string();
    return fused.empty() ? "alone: " + job.name() : fused;
  }

  void share_extents() {
    std::map<std::string, size_t> sets;
    for (size_t index = 0; index < plan_.jobs.size(); ++index) {
      PlanJob& job = plan_.jobs[index];
      if (job.matrix == nullptr || !job.encoder->needs_extent()) {
        continue;
      }
      const auto [found, added] = sets.emplace(extent_key(job), plan_.extent_sets.size());
      if (added) {
        plan_.extent_sets.emplace_back();
      }
      plan_.extent_sets[found->second].push_back(index);
      job.extent_set = found->second;
    }
  }

  Status place_outputs() {
    std::vector<std::vector<PlannedTensor>*> outputs;
    for (PlanJob& job : plan_.jobs) {
      outputs.push_back(&job.outputs);
    }
    NIBBLE_ASSIGN_OR_RETURN(plan_.shards, layout_shards(outputs, options_.shard_bytes));
    for (size_t shard = 0; shard < plan_.shards.size(); ++shard) {
      plan_.bytes_out += plan_.shards[shard].file_bytes;
      for (const size_t job : plan_.shards[shard].jobs) {
        plan_.jobs[job].shard = shard;
        plan_.bytes_in += plan_.jobs[job].bytes_in;
      }
    }
    return {};
  }

  const CheckpointReader& reader_;
  const Json& config_;
  const PlanOptions& options_;
  QuantizePlan plan_;
  const SourceMatrix* tied_head_ = nullptr;  // of plan_.source, if it reads the embeddings' table
  std::vector<DecidedMatrix> decided_;
  std::optional<Dialect> dialect_;
  std::map<std::tuple<std::string, int64_t, int64_t>, const MatrixEncoder*> encoders_;
  std::set<const TensorInfo*> consumed_;
  std::unordered_set<const TensorInfo*> passed_;
};

Result<QuantizePlan> make_plan(const CheckpointReader& reader,
                               const Json& config,
                               const PlanOptions& options) {
  return Planner(reader, config, options).run();
}

}  // namespace nibble
