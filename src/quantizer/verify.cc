#include "quantizer/verify.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <unordered_map>

#include "arch/model_text.h"
#include "base/file.h"
#include "base/thread_pool.h"
#include "checkpoint/source_matrix.h"
#include "quantizer/algorithms/method.h"
#include "quantizer/own_head.h"
#include "quantizer/plan_checks.h"
#include "quantizer/quantize_report.h"
#include "quantizer/recipe.h"
#include "quantizer/verify_files.h"

namespace nibble {
namespace {

constexpr int64_t kRowsPerTask = 128;
constexpr size_t kLanes = 8;  // independent sums, so that the loop vectorises
constexpr double kEqualDb = 200;

/// A model folder, opened.
struct Folder {
  CheckpointReader reader;
  Json config;
  SourceModel model;
  std::unordered_map<std::string_view, const SourceMatrix*> by_module;
  std::unordered_map<std::string_view, const TensorInfo*> others;
};

Result<Folder> open_folder(const std::string& path) {
  NIBBLE_ASSIGN_OR_RETURN(CheckpointReader reader, CheckpointReader::open(path));
  NIBBLE_ASSIGN_OR_RETURN(Json config, read_config_json(path));
  NIBBLE_ASSIGN_OR_RETURN(SourceModel model, list_source_matrices(reader, config));
  Folder folder{std::move(reader), std::move(config), std::move(model), {}, {}};
  for (const auto& matrix : folder.model.matrices) {
    folder.by_module.emplace(matrix->module(), matrix.get());
  }
  for (const TensorInfo* tensor : folder.model.others) {
    folder.others.emplace(tensor->name, tensor);
  }
  return folder;
}

ResultHead head_of(const Folder& result) {
  const SourceMatrix* head = find_head(result.config, result.model);
  return head != nullptr && !is_plain_source(*head) ? ResultHead::kOwn : ResultHead::kAsInSource;
}

/// Sums over the weights of some rows: w of the source, v of the result.
struct Sums {
  double signal = 0;   // w^2
  double noise = 0;    // (w - v)^2
  double product = 0;  // w * v
  double energy = 0;   // v^2
  float max_error = 0;
  bool finite = true;

  void add(const Sums& other) {
    signal += other.signal;
    noise += other.noise;
    product += other.product;
    energy += other.energy;
    max_error = std::max(max_error, other.max_error);
    finite = finite && other.finite;
  }
};

Sums compare(const float* w, const float* v, int64_t count) {
  std::array<Sums, kLanes> lanes{};
  for (int64_t i = 0; i < count; ++i) {
    Sums& lane = lanes[static_cast<size_t>(i) % kLanes];
    const double from = w[i];
    const double to = v[i];
    const double difference = from - to;
    lane.signal += from * from;
    lane.noise += difference * difference;
    lane.product += from * to;
    lane.energy += to * to;
    lane.max_error = std::max(lane.max_error, std::fabs(w[i] - v[i]));
  }
  Sums total;
  for (const Sums& lane : lanes) {
    total.add(lane);
  }
  total.finite = std::isfinite(total.signal) && std::isfinite(total.energy);
  return total;
}

double snr_db(const Sums& sums) {
  if (sums.noise <= 0) {
    return kEqualDb;
  }
  return sums.signal <= 0 ? -kEqualDb : 10 * std::log10(sums.signal / sums.noise);
}

double cosine(const Sums& sums) {
  const double norms = std::sqrt(sums.signal) * std::sqrt(sums.energy);
  return norms > 0 ? sums.product / norms : (sums.signal == sums.energy ? 1 : 0);
}

// Lets the system forget what these rows lie in, unless other rows lie in the same bytes.
void forget(const CheckpointReader& reader, const SourceMatrix& matrix, int64_t row, int64_t rows) {
  const auto parts = matrix.touched(row, rows);
  if (bytes_of(parts) <= rows * matrix.k() * static_cast<int64_t>(sizeof(float))) {
    for (const auto& part : parts) {
      reader.drop_pages(part);
    }
  }
}

bool equal_bytes(const CheckpointReader& a_reader,
                 std::span<const std::byte> a,
                 const CheckpointReader& b_reader,
                 std::span<const std::byte> b) {
  constexpr size_t kPiece = size_t{16} << 20;
  bool equal = a.size() == b.size();
  for (size_t at = 0; equal && at < a.size(); at += kPiece) {
    const auto first = a.subspan(at, std::min(kPiece, a.size() - at));
    const auto second = b.subspan(at, first.size());
    equal = std::equal(first.begin(), first.end(), second.begin());
    a_reader.drop_pages(first);
    b_reader.drop_pages(second);
  }
  return equal;
}

class Verifier final {
 public:
  Verifier(const VerifyOptions& options, const Folder& from, const Folder& to)
      : options_(options), from_(from), to_(to), pool_(options.threads) {
    buffers_.resize(static_cast<size_t>(pool_.threads()));
  }

  Result<VerifyReport> run();

 private:
  void match_matrices();
  void match_others();
  Status verify_matrix(const SourceMatrix& from, const SourceMatrix& to);
  Result<Sums> compare_rows(const SourceMatrix& from, const SourceMatrix& to);
  Status check_files();
  void progress(const SourceMatrix& matrix);
  void problem(std::string text) { report_.problems.push_back(std::move(text)); }
  [[nodiscard]] bool was_copied(const SourceMatrix& from, const SourceMatrix& to) const;

  const VerifyOptions& options_;
  const Folder& from_;
  const Folder& to_;
  ThreadPool pool_;
  std::vector<std::vector<float>> buffers_;  // of each thread: rows of both
  ReportedFigures reported_;
  VerifyReport report_;
  int64_t done_ = 0;  // bytes of the source
};

// Tensors that hold something other than a matrix, or one that nobody reads as a matrix.
void Verifier::match_others() {
  for (const auto& [name, tensor] : from_.others) {
    const auto found = to_.others.find(name);
    if (found == to_.others.end()) {
      if (to_.reader.find(name) == nullptr) {
        problem(fmt::format("{}: missing in {}", from_.reader.where(*tensor), to_.reader.path()));
      }
      continue;
    }
    const TensorInfo& copy = *found->second;
    if (copy.dtype != tensor->dtype || copy.shape != tensor->shape ||
        !equal_bytes(from_.reader, tensor->data, to_.reader, copy.data)) {
      problem(fmt::format("{}: differs from the source, which was to be copied",
                          to_.reader.where(copy)));
      continue;
    }
    ++report_.copied_tensors;
  }
  for (const auto& [name, tensor] : to_.others) {
    if (from_.reader.find(name) == nullptr) {
      problem(fmt::format("{}: the source has no such tensor", to_.reader.where(*tensor)));
    }
  }
}

void Verifier::match_matrices() {
  for (const auto& matrix : from_.model.matrices) {
    const auto found = to_.by_module.find(matrix->module());
    if (found == to_.by_module.end()) {
      problem(fmt::format("{}: no weights of it in {}", matrix->where(), options_.destination));
    } else if (found->second->n() != matrix->n() || found->second->k() != matrix->k()) {
      problem(fmt::format("{}: shape [{}, {}], but the source's is [{}, {}]",
                          found->second->where(), found->second->n(), found->second->k(),
                          matrix->n(), matrix->k()));
    }
  }
  for (const auto& matrix : to_.model.matrices) {
    if (!from_.by_module.contains(matrix->module())) {
      problem(fmt::format("{}: the source has no such module", matrix->where()));
    }
  }
}

// Whether the result should hold the same bytes: what the report does not list was left alone, and
// without a report that is at least what looks the same.
bool Verifier::was_copied(const SourceMatrix& from, const SourceMatrix& to) const {
  if (reported_.found) {
    return !reported_.tensors.contains(from.module());
  }
  return from.tensors().size() == 1 && to.tensors().size() == 1 &&
         from.tensors()[0]->dtype == to.tensors()[0]->dtype;
}

Result<Sums> Verifier::compare_rows(const SourceMatrix& from, const SourceMatrix& to) {
  const int64_t tasks = (from.n() + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t k = from.k();
  std::vector<Sums> parts(static_cast<size_t>(tasks));
  std::mutex mutex;
  Status failure;
  pool_.parallel_for(tasks, [&](int64_t task, int thread) {
    const int64_t row = task * kRowsPerTask;
    const int64_t rows = std::min(kRowsPerTask, from.n() - row);
    std::vector<float>& buffer = buffers_[static_cast<size_t>(thread)];
    buffer.resize(std::max(buffer.size(), static_cast<size_t>(2 * kRowsPerTask * k)));
    float* w = buffer.data();
    float* v = w + kRowsPerTask * k;
    Status status = from.decode(row, rows, w);
    status = status.ok() ? to.decode(row, rows, v) : std::move(status);
    if (!status.ok()) {
      const std::lock_guard lock(mutex);
      failure = failure.ok() ? std::move(status) : std::move(failure);
      return;
    }
    parts[static_cast<size_t>(task)] = compare(w, v, rows * k);
    forget(from_.reader, from, row, rows);
    forget(to_.reader, to, row, rows);
  });
  NIBBLE_RETURN_IF_ERROR(failure);
  Sums total;
  for (const Sums& part : parts) {
    total.add(part);
  }
  return total;
}

Status Verifier::verify_matrix(const SourceMatrix& from, const SourceMatrix& to) {
  NIBBLE_ASSIGN_OR_RETURN(const Sums sums, compare_rows(from, to));
  const double db = snr_db(sums);
  if (!sums.finite) {
    problem(fmt::format("{}: weights that are not finite, in it or in the source", to.where()));
  }
  if (was_copied(from, to)) {
    if (sums.noise != 0) {
      problem(fmt::format("{}: differs from the source, which was to be copied", to.where()));
    } else {
      report_.copied_tensors += static_cast<int64_t>(to.tensors().size());
    }
    return {};
  }
  report_.matrices.push_back({from.module(), from.format(), to.format(), from.n(), from.k(), db,
                              cosine(sums), sums.max_error});
  const auto reported = reported_.tensors.find(from.module());
  constexpr double kRounding = 1e-3;  // dB: sums of single precision against double
  if (reported != reported_.tensors.end() && std::fabs(reported->second - db) > kRounding) {
    problem(fmt::format("{}: {} says {:.3f} dB, the files give {:.3f}", to.where(), kReportName,
                        reported->second, db));
  }
  return {};
}

void Verifier::progress(const SourceMatrix& matrix) {
  for (const TensorInfo* tensor : matrix.tensors()) {
    done_ += static_cast<int64_t>(tensor->data.size());
  }
  done_ = std::min(done_, from_.reader.total_bytes());
  if (options_.progress) {
    options_.progress(done_, from_.reader.total_bytes(), matrix.module());
  }
}

Status Verifier::check_files() {
  NIBBLE_ASSIGN_OR_RETURN(const FileComparison files,
                          compare_model_files(options_.source, options_.destination, head_of(to_)));
  report_.copied_files = files.equal;
  report_.problems.insert(report_.problems.end(), files.problems.begin(), files.problems.end());
  return {};
}

Result<VerifyReport> Verifier::run() {
  NIBBLE_ASSIGN_OR_RETURN(reported_, read_reported_figures(options_.destination));
  match_matrices();
  match_others();
  NIBBLE_RETURN_IF_ERROR(check_files());
  for (const auto& [module, db] : reported_.tensors) {
    if (!to_.by_module.contains(module)) {
      problem(fmt::format("{}: lists {}, which is not in the files", kReportName, module));
    }
  }
  for (const auto& from : from_.model.matrices) {
    const auto to = to_.by_module.find(from->module());
    if (to != to_.by_module.end() && to->second->n() == from->n() && to->second->k() == from->k()) {
      NIBBLE_RETURN_IF_ERROR(verify_matrix(*from, *to->second));
      for (const TensorInfo* tensor : to->second->tensors()) {
        to_.reader.drop_pages(*tensor);
      }
    }
    progress(*from);
    for (const TensorInfo* tensor : from->tensors()) {
      from_.reader.drop_pages(*tensor);
    }
  }
  std::stable_sort(
      report_.matrices.begin(), report_.matrices.end(),
      [](const VerifiedMatrix& a, const VerifiedMatrix& b) { return a.snr_db < b.snr_db; });
  return std::move(report_);
}

// A transform leaves the model what it was, but no matrix.
Status check_comparable(const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kRecipeName);
  if (!file_exists(path)) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const PlanOptions recipe, read_recipe(path));
  const Json* name = recipe.calibration.find("method");
  if (name == nullptr || !name->is_string()) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Method method, parse_method(name->as_string()));
  return method.transforms.empty()
             ? Status()
             : make_error(StatusCode::kUnsupported,
                          "{}: made by method {}, which changes matrices before they are rounded, "
                          "so that they cannot be compared one by one; compare what the models "
                          "compute with nibble eval kld",
                          folder, name->as_string());
}

}  // namespace

Result<VerifyReport> verify_checkpoint(const VerifyOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_comparable(options.destination));
  NIBBLE_ASSIGN_OR_RETURN(Folder from, open_folder(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const Folder to, open_folder(options.destination));
  if (head_of(to) == ResultHead::kOwn) {
    // Without one in the source, it was made from the embeddings' table.
    const auto tied = add_tied_head(from.reader, from.config, from.model);
    if (tied.ok() && *tied != nullptr) {
      from.by_module.emplace((*tied)->module(), *tied);
    }
  }
  return Verifier(options, from, to).run();
}

}  // namespace nibble
