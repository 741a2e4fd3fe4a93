#include "calibration/job_rounder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.h"
#include "quant/codec.h"

namespace nibble {
namespace {

/// Puts rounded rows into a matrix that layers can multiply.
void put_rows(const RoundedMatrix& rounded, int64_t first, QuantTensor& out, ThreadPool& pool) {
  const int64_t k = out.k;
  const int64_t groups = out.format.groups(k);
  const int64_t rows = std::ssize(rounded.values) / k;
  float* scales = out.scales.as<float>().data() + first * groups;
  std::copy(rounded.scales.begin(), rounded.scales.end(), scales);
  int8_t* zeros = rounded.zeros.empty() ? nullptr : out.zeros.as<int8_t>().data() + first * groups;
  for (size_t i = 0; i < rounded.zeros.size(); ++i) {
    zeros[i] = static_cast<int8_t>(rounded.zeros[i]);
  }
  pool.parallel_for(rows, [&](int64_t row, int) {
    encode_row(out.format, rounded.values.data() + row * k, k,
               {scales + row * groups, zeros == nullptr ? nullptr : zeros + row * groups},
               out.codes.data() + (first + row) * out.row_bytes());
  });
}

/// Why a rounding is none of the method's, given the statistics; empty: it is.
std::string fallback_of(const SiteStatistics& statistics, Rounding rounding, Rounding method) {
  if (method == Rounding::kRtn) {
    return {};
  }
  if (statistics.gram == nullptr) {
    return "inputs that are no numbers";
  }
  if (rounding != method) {
    return "few rows";
  }
  if (method == Rounding::kImatrix) {
    return {};
  }
  if (!statistics.factor) {
    return "singular sums";
  }
  return method == Rounding::kGptaq && statistics.drift.empty()
             ? "unrounded inputs that are no numbers"
             : std::string();
}

}  // namespace

struct JobRounder::Matrix {
  size_t index;
  const PlanJob& job;
  int64_t step;                            // rows of a piece
  std::vector<float> w;                    // of a piece
  std::optional<RoundedJob> out = {};      // empty: stored by a run that was interrupted
  std::optional<QuantTensor> weight = {};  // for the layers; empty: none reads it
  CalibrationRecord record = {};
  double outputs = 0;

  Status decode(const CheckpointReader& reader, int64_t row) {
    const int64_t rows = std::min(step, job.matrix->n() - row);
    w.resize(static_cast<size_t>(rows * job.matrix->k()));
    return decode_once(*job.matrix, reader, {row, rows}, w.data());
  }
};

Status JobRounder::round(const std::vector<size_t>& jobs, InputSums& sums, Rounding rounding) {
  sums.gram.finish();
  const SiteStatistics statistics =
      make_site_statistics(sums.gram, rounding, parts_.pool, sums.drift ? &*sums.drift : nullptr);
  if (statistics.gram == nullptr && !jobs.empty()) {
    NIBBLE_LOG(kWarning,
               "{}: what it multiplies holds numbers that are infinite or none; it is rounded to "
               "the nearest codes",
               parts_.context.plan.jobs[jobs.front()].name());
  }
  const std::string fallback = fallback_of(statistics, rounding, parts_.method);
  for (const size_t job : jobs) {
    NIBBLE_RETURN_IF_ERROR(round_job(job, {statistics, rounding, sums.gram.rows(), fallback}));
  }
  return {};
}

Status JobRounder::round_job(size_t index, const Inputs& inputs) {
  const PlanJob& job = parts_.context.plan.jobs[index];
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  Matrix matrix{.index = index, .job = job, .step = piece_rows(job, parts_.piece_weights), .w = {}};
  float absmax = 0;
  for (int64_t row = 0; row < n; row += matrix.step) {
    NIBBLE_RETURN_IF_ERROR(matrix.decode(parts_.context.reader, row));
    const auto largest = absmax_of(matrix.w.data(), row, std::ssize(matrix.w) / k, k);
    NIBBLE_RETURN_IF_ERROR(largest.status().with_context(job.matrix->where()));
    absmax = std::max(absmax, *largest);
  }
  if (!parts_.context.store.done(index)) {
    matrix.out.emplace(parts_.context, index, absmax);
  }
  if (parts_.runner.in_layer()) {
    NIBBLE_ASSIGN_OR_RETURN(matrix.weight, QuantTensor::allocate(job.scheme.weight, n, k));
  }
  NIBBLE_RETURN_IF_ERROR(round_pieces(matrix, inputs));
  return finish(matrix);
}

Status JobRounder::round_pieces(Matrix& matrix, const Inputs& inputs) {
  const PlanJob& job = matrix.job;
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  CalibrationRecord& record = matrix.record;
  record = {.rounding = std::string(rounding_name(Rounding::kRtn)),
            .rows = inputs.rows,
            .fallback = inputs.fallback};
  for (int64_t row = 0; row < n; row += matrix.step) {
    if (matrix.step < n) {
      NIBBLE_RETURN_IF_ERROR(matrix.decode(parts_.context.reader, row));
    }
    const RoundedMatrix rounded = round_matrix({.w = matrix.w.data(),
                                                .n = std::ssize(matrix.w) / k,
                                                .k = k,
                                                .format = job.scheme.weight,
                                                .encoder = job.encoder},
                                               inputs.rounding, inputs.statistics, parts_.pool);
    if (rounded.rounding != Rounding::kRtn) {
      record.rounding = rounding_name(rounded.rounding);
    }
    record.error += rounded.error * rounded.outputs;
    record.rtn_error += rounded.rtn_error * rounded.outputs;
    matrix.outputs += rounded.outputs;
    if (matrix.weight) {
      put_rows(rounded, row, *matrix.weight, parts_.pool);
    }
    if (matrix.out) {
      NIBBLE_RETURN_IF_ERROR(matrix.out->add(matrix.w, rounded));
    }
  }
  record.error = matrix.outputs > 0 ? record.error / matrix.outputs : 0;
  record.rtn_error = matrix.outputs > 0 ? record.rtn_error / matrix.outputs : 0;
  return {};
}

Status JobRounder::finish(Matrix& matrix) {
  ++kept_[matrix.record.rounding];
  if (!matrix.record.fallback.empty()) {
    ++fallbacks_[matrix.record.fallback];
  }
  if (matrix.weight) {
    parts_.runner.substitute(matrix.job.name(), *std::move(matrix.weight), matrix.job.scheme.act);
  }
  if (!matrix.out) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(matrix.out->finish(matrix.record));
  progress_.bytes_done += matrix.job.bytes_in;
  ++progress_.tensors_done;
  progress_.tensor = matrix.job.name();
  if (parts_.context.progress) {
    parts_.context.progress(progress_);
  }
  return {};
}

void JobRounder::report() const {
  for (const auto& [name, count] : kept_) {
    NIBBLE_LOG(kInfo, "calibration: {} matrices rounded by {}", count, name);
  }
  for (const auto& [reason, count] : fallbacks_) {
    NIBBLE_LOG(kWarning, "calibration: the method could not be applied to {} matrices: {}", count,
               reason);
  }
}

}  // namespace nibble
