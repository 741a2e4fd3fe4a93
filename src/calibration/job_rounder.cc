#include "calibration/job_rounder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/math.h"
#include "quant/codec.h"
#include "quantizer/algorithms/activations.h"

namespace nibble {
namespace {

constexpr int64_t kDecodedRows = 16;  // that a thread decodes at a time

/// Puts rounded rows into a matrix that layers can multiply.
void put_rows(const RoundedMatrix& rounded, int64_t first, QuantTensor& out, ThreadPool& pool) {
  const int64_t k = out.k;
  const int64_t groups = out.format.groups(k);
  const int64_t rows = std::ssize(rounded.values) / k;
  float* scales = out.scales.as<float>().data() + first * groups;
  std::copy(rounded.scales.begin(), rounded.scales.end(), scales);
  int8_t* zeros = nullptr;
  if (!rounded.zeros.empty()) {
    zeros = out.zeros.as<int8_t>().data() + first * groups;
    std::ranges::transform(rounded.zeros, zeros,
                           [](float zero) { return static_cast<int8_t>(zero); });
  }
  pool.parallel_for(rows, [&](int64_t row, int) {
    encode_row(out.format, rounded.values.data() + row * k, k,
               {scales + row * groups, zeros == nullptr ? nullptr : zeros + row * groups},
               out.codes.data() + (first + row) * out.row_bytes());
  });
}

/// Why a rounding is none of the method's; empty: it is.
std::string fallback_of(const MatrixRounder& rounder, Rounding method) {
  if (method == Rounding::kRtn) {
    return {};
  }
  if (!rounder.has_sums()) {
    return "inputs that are no numbers";
  }
  if (rounder.asked() != method) {
    return "few rows";
  }
  if (method == Rounding::kImatrix) {
    return {};
  }
  if (!rounder.has_factor()) {
    return "singular sums";
  }
  return method == Rounding::kGptaq && !rounder.has_drift() ? "unrounded inputs that are no numbers"
                                                            : std::string();
}

}  // namespace

struct JobRounder::Matrix {
  size_t index;
  const PlanJob& job;
  int64_t step;                            // rows of a piece
  std::span<float> w;                      // of a piece
  std::optional<RoundedJob> out = {};      // empty: stored by a run that was interrupted
  std::optional<QuantTensor> weight = {};  // for the layers; empty: none reads it
  CalibrationRecord record = {};
  double outputs = 0;
};

Status JobRounder::round(const std::vector<size_t>& jobs, InputSums& sums, Rounding rounding) {
  HostRounder rounder(sums, rounding, parts_.pool, parts_.times);
  act_ = sums.form.act;
  Status done = round_all(jobs, rounder);
  rounded_ = {};  // memory for the next pass
  return done;
}

Status JobRounder::round(const std::vector<size_t>& jobs, SiteMath& site, Rounding rounding) {
  CHECK(parts_.device != nullptr);
  act_.reset();
  NIBBLE_ASSIGN_OR_RETURN(const auto rounder,
                          DeviceRounder::create(site, rounding, *parts_.device));
  return round_all(jobs, *rounder);
}

Status JobRounder::round_all(const std::vector<size_t>& jobs, MatrixRounder& rounder) {
  if (!rounder.has_sums() && !jobs.empty()) {
    NIBBLE_LOG(kWarning,
               "{}: what it multiplies holds numbers that are infinite or none; it is rounded to "
               "the nearest codes",
               parts_.context.plan.jobs[jobs.front()].name());
  }
  const std::string fallback = fallback_of(rounder, parts_.method);
  const std::optional<size_t> last = std::exchange(expected_, std::nullopt);
  for (size_t i = 0; i < jobs.size(); ++i) {
    next_ = i + 1 < jobs.size() ? std::optional(jobs[i + 1]) : last;
    NIBBLE_RETURN_IF_ERROR(round_job(jobs[i], rounder, fallback));
  }
  return {};
}

std::optional<JobRounder::Piece> JobRounder::piece_after(const Matrix& matrix, int64_t row) const {
  if (row + matrix.step < matrix.job.matrix->n()) {
    return Piece{matrix.index, row + matrix.step};
  }
  // One whose extent is needed is read as a whole first.
  const bool known = next_ && !parts_.context.plan.jobs[*next_].encoder->needs_extent();
  return known ? std::optional(Piece{*next_, 0}) : std::nullopt;
}

Status JobRounder::decode(Matrix& matrix, int64_t row, MatrixRounder& rounder) {
  const Piece piece{matrix.index, row};
  const std::optional<Ahead> ahead = std::exchange(ahead_, std::nullopt);
  if (ahead && ahead->piece == piece) {
    NIBBLE_ASSIGN_OR_RETURN(matrix.w, ahead->w);
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(matrix.w, decode_piece(piece, rounder));
  return {};
}

Result<std::span<float>> JobRounder::decode_piece(const Piece& piece, MatrixRounder& rounder) {
  const PlanJob& job = parts_.context.plan.jobs[piece.job];
  const SourceMatrix& source = *job.matrix;
  const int64_t rows = std::min(piece_rows(job, parts_.piece_weights), source.n() - piece.row);
  NIBBLE_ASSIGN_OR_RETURN(const std::span<float> w,
                          rounder.weights(static_cast<size_t>(rows * source.k())));
  const Status decoded = parts_.times.time(CalibrationPart::kLoad, [&]() -> Status {
    std::vector<Status> statuses(static_cast<size_t>(ceil_div(rows, kDecodedRows)));
    parts_.pool.parallel_for(std::ssize(statuses), [&](int64_t part, int) {
      const int64_t first = part * kDecodedRows;
      statuses[static_cast<size_t>(part)] = source.decode(
          piece.row + first, std::min(kDecodedRows, rows - first), w.data() + first * source.k());
    });
    for (const std::span<const std::byte> part : source.touched(piece.row, rows)) {
      parts_.context.reader.drop_pages(part);
    }
    const auto failed = std::ranges::find_if(statuses, [](const Status& s) { return !s.ok(); });
    return failed == statuses.end() ? Status() : *failed;
  });
  NIBBLE_RETURN_IF_ERROR(decoded);
  if (act_ && act_->columns != nullptr) {
    order_channels(*act_->columns, {w.data(), rows, source.k()}, parts_.pool);
  }
  return w;
}

Result<float> JobRounder::absmax_of_rows(const Matrix& matrix, int64_t row) {
  const int64_t k = matrix.job.matrix->k();
  const int64_t rows = std::ssize(matrix.w) / k;
  std::vector<Result<float>> parts(static_cast<size_t>(ceil_div(rows, kDecodedRows)),
                                   Result<float>(0.0F));
  parts_.pool.parallel_for(std::ssize(parts), [&](int64_t part, int) {
    const int64_t first = part * kDecodedRows;
    parts[static_cast<size_t>(part)] = absmax_of(matrix.w.data() + first * k, row + first,
                                                 std::min(kDecodedRows, rows - first), k);
  });
  float absmax = 0;
  for (const Result<float>& part : parts) {
    NIBBLE_RETURN_IF_ERROR(part.status().with_context(matrix.job.matrix->where()));
    absmax = std::max(absmax, *part);
  }
  return absmax;
}

Status JobRounder::round_job(size_t index, MatrixRounder& rounder, const std::string& fallback) {
  const PlanJob& job = parts_.context.plan.jobs[index];
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  Matrix matrix{.index = index, .job = job, .step = piece_rows(job, parts_.piece_weights), .w = {}};
  float absmax = 0;
  for (int64_t row = 0; row < n && job.encoder->needs_extent(); row += matrix.step) {
    NIBBLE_RETURN_IF_ERROR(decode(matrix, row, rounder));
    NIBBLE_ASSIGN_OR_RETURN(const float largest, absmax_of_rows(matrix, row));
    absmax = std::max(absmax, largest);
  }
  if (!parts_.context.store.done(index)) {
    matrix.out.emplace(parts_.context, index, absmax);
  }
  if (parts_.runner.in_layer()) {
    NIBBLE_ASSIGN_OR_RETURN(matrix.weight, QuantTensor::allocate(job.scheme.weight, n, k));
  }
  matrix.record = {.rounding = std::string(rounding_name(Rounding::kRtn)),
                   .rows = rounder.rows(),
                   .fallback = fallback};
  NIBBLE_RETURN_IF_ERROR(round_pieces(matrix, rounder));
  return finish(matrix);
}

Status JobRounder::round_pieces(Matrix& matrix, MatrixRounder& rounder) {
  const PlanJob& job = matrix.job;
  const int64_t n = job.matrix->n();
  const int64_t k = job.matrix->k();
  CalibrationRecord& record = matrix.record;
  for (int64_t row = 0; row < n; row += matrix.step) {
    NIBBLE_RETURN_IF_ERROR(decode(matrix, row, rounder));
    NIBBLE_RETURN_IF_ERROR(parts_.times.time(CalibrationPart::kLoad,
                                             [&] { return absmax_of_rows(matrix, row).status(); }));
    const auto decode_next = [&] {
      if (const std::optional<Piece> next = piece_after(matrix, row)) {
        ahead_ = Ahead{*next, decode_piece(*next, rounder)};
      }
    };
    NIBBLE_RETURN_IF_ERROR(rounder.round({.w = matrix.w.data(),
                                          .n = std::ssize(matrix.w) / k,
                                          .k = k,
                                          .format = job.scheme.weight,
                                          .encoder = job.encoder},
                                         rounded_, decode_next));
    if (rounded_.rounding != Rounding::kRtn) {
      record.rounding = rounding_name(rounded_.rounding);
    }
    record.error += rounded_.error * rounded_.outputs;
    record.rtn_error += rounded_.rtn_error * rounded_.outputs;
    matrix.outputs += rounded_.outputs;
    NIBBLE_RETURN_IF_ERROR(parts_.times.time(CalibrationPart::kEncode, [&]() -> Status {
      if (matrix.weight) {
        put_rows(rounded_, row, *matrix.weight, parts_.pool);
      }
      return matrix.out ? matrix.out->add(matrix.w, rounded_, parts_.pool) : Status();
    }));
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
    parts_.runner.substitute(matrix.job.name(), *std::move(matrix.weight),
                             act_.value_or(matrix.job.scheme.act));
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
