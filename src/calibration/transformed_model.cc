#include "calibration/transformed_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "arch/family.h"
#include "base/f16.h"
#include "base/file.h"
#include "base/log.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/output_folder.h"
#include "checkpoint/quant_config_writer.h"
#include "checkpoint/source_matrix.h"
#include "model/weight_loader.h"
#include "quant/hadamard.h"
#include "quantizer/model_files.h"
#include "quantizer/plan_config.h"

namespace nibble {
namespace {

constexpr const char* kStampName = ".nibble_transform.json";
constexpr int64_t kShardBytes = int64_t{5} << 30;
constexpr int64_t kBlockBytes = int64_t{32} << 20;  // rows that are changed at once
constexpr int64_t kStrip = 16;                      // columns that are rotated at once

std::string stamp_path(const std::string& folder) {
  return fmt::format("{}/{}", folder, kStampName);
}

/// Rows of a tensor, and where they lie in it.
struct Rows {
  float* w = nullptr;  // [count, k]
  int64_t first = 0;
  int64_t count = 0;
  int64_t k = 0;
};

void rotate_run(const Rotation& rotation, double* run, int64_t length) {
  for (int64_t at = 0; at < length; at += rotation.size()) {
    rotation.apply(run + at);
  }
}

void fold_columns(const TensorFold& fold, const Rows& rows, ThreadPool& pool) {
  if (fold.column_order.empty() && fold.column_factors.empty() && fold.column_rotation == nullptr &&
      fold.column_turn == 0) {
    return;
  }
  pool.parallel_for(rows.count, [&](int64_t row, int) {
    float* w = rows.w + row * rows.k;
    std::vector<double> wide(w, w + rows.k);
    for (size_t i = 0; i < fold.column_order.size(); ++i) {
      wide[i] = static_cast<double>(w[fold.column_order[i]]);
    }
    for (size_t i = 0; i < fold.column_factors.size(); ++i) {
      wide[i] *= static_cast<double>(fold.column_factors[i]);
    }
    if (fold.column_rotation != nullptr) {
      rotate_run(*fold.column_rotation, wide.data(), rows.k);
    }
    if (fold.column_turn != 0) {
      turn_blocks(wide.data(), rows.k, fold.column_turn);
    }
    std::transform(wide.begin(), wide.end(), w, [](double x) { return static_cast<float>(x); });
  });
}

void fold_rows(const TensorFold& fold, const Rows& rows, ThreadPool& pool) {
  if (!fold.row_order.empty()) {  // all rows are there
    const std::vector<float> old(rows.w, rows.w + rows.count * rows.k);
    for (int64_t row = 0; row < rows.count; ++row) {
      const float* from = old.data() + fold.row_order[static_cast<size_t>(row)] * rows.k;
      std::copy_n(from, rows.k, rows.w + row * rows.k);
    }
  }
  if (fold.row_rotation != nullptr) {  // all rows are there
    pool.parallel_for(ceil_div(rows.k, kStrip), [&](int64_t strip, int) {
      const int64_t begin = strip * kStrip;
      const int64_t width = std::min(kStrip, rows.k - begin);
      std::vector<double> columns(static_cast<size_t>(rows.count * width));
      for (int64_t row = 0; row < rows.count; ++row) {
        for (int64_t i = 0; i < width; ++i) {
          columns[static_cast<size_t>(i * rows.count + row)] =
              static_cast<double>(rows.w[row * rows.k + begin + i]);
        }
      }
      for (int64_t i = 0; i < width; ++i) {
        rotate_run(*fold.row_rotation, columns.data() + i * rows.count, rows.count);
      }
      for (int64_t row = 0; row < rows.count; ++row) {
        for (int64_t i = 0; i < width; ++i) {
          rows.w[row * rows.k + begin + i] =
              static_cast<float>(columns[static_cast<size_t>(i * rows.count + row)]);
        }
      }
    });
  }
  for (int64_t row = 0; !fold.row_factors.empty() && row < rows.count; ++row) {
    const float factor = fold.row_factors[static_cast<size_t>(rows.first + row)];
    for (int64_t i = 0; i < rows.k; ++i) {
      rows.w[row * rows.k + i] *= factor;
    }
  }
}

/// Numbers as they are stored.
std::vector<std::byte> stored(const float* x, int64_t count, DType dtype) {
  const auto size = static_cast<size_t>(dtype_bits(dtype) / 8);
  std::vector<std::byte> bytes(static_cast<size_t>(count) * size);
  if (dtype == DType::kF32) {
    std::memcpy(bytes.data(), x, bytes.size());
    return bytes;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t half = dtype == DType::kBF16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]);
    std::memcpy(bytes.data() + static_cast<size_t>(i) * size, &half, size);
  }
  return bytes;
}

/// One call of write_transformed_model().
class Transformation final {
 public:
  explicit Transformation(const TransformedModel& wanted)
      : pool_(wanted.threads), wanted_(wanted) {}

  Status run() {
    NIBBLE_ASSIGN_OR_RETURN(config_, load_model_config(wanted_.source));
    NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(wanted_.source));
    NIBBLE_ASSIGN_OR_RETURN(const Json json, read_config(wanted_.source));
    NIBBLE_ASSIGN_OR_RETURN(const SourceModel model, list_source_matrices(reader, json));
    NIBBLE_ASSIGN_OR_RETURN(WeightLoader vectors, WeightLoader::open(wanted_.source, config_));
    vectors_ = &vectors;
    reader_ = &reader;
    config_.family = vectors.config().family;
    for (const auto& matrix : model.matrices) {
      matrices_.emplace(matrix->module(), matrix.get());
    }
    NIBBLE_ASSIGN_OR_RETURN(head_, vectors.head_module());
    const bool own_head = head_ != module_name(*config_.family, Role::kEmbedding);
    const bool unties =
        config_.tie_word_embeddings && (own_head || wanted_.transform->unties_head());
    config_.tie_word_embeddings = config_.tie_word_embeddings && !unties;
    if (unties) {
      NIBBLE_LOG(kInfo,
                 "{}: the head is no longer the embeddings' table but a matrix of its own, of {} "
                 "weights",
                 wanted_.source, config_.vocab_size * config_.hidden_size);
    }
    const std::vector<ModelTensor> tensors = list_tensors(config_);
    std::vector<TensorPlan> plan;
    plan.reserve(tensors.size());
    for (const ModelTensor& tensor : tensors) {
      plan.push_back({tensor.name, dtype_of(tensor), tensor.shape, 0});
    }
    NIBBLE_ASSIGN_OR_RETURN(OutputFolder folder,
                            OutputFolder::create(wanted_.destination, ExistingOutput::kReplace));
    NIBBLE_ASSIGN_OR_RETURN(CheckpointWriter writer,
                            CheckpointWriter::create(folder.path(), plan, kShardBytes));
    for (const ModelTensor& tensor : tensors) {
      NIBBLE_RETURN_IF_ERROR(write(tensor, writer));
    }
    NIBBLE_RETURN_IF_ERROR(writer.finish());
    NIBBLE_RETURN_IF_ERROR(copy_model_files(wanted_.source, folder.path()));
    QuantizePlan plain;  // config.json says that nothing is quantized
    plain.own_head = unties;
    NIBBLE_ASSIGN_OR_RETURN(plain.quantization_config, written_quantization(json));
    NIBBLE_RETURN_IF_ERROR(write_config(wanted_.source, folder.path(), plain));
    NIBBLE_ASSIGN_OR_RETURN(OutputFile stamp, OutputFile::create(stamp_path(folder.path())));
    NIBBLE_RETURN_IF_ERROR(stamp.write(wanted_.stamp.dump()));
    NIBBLE_RETURN_IF_ERROR(stamp.finish());
    return folder.commit();
  }

 private:
  /// The source's online transforms and those of this change; null: there are none.
  [[nodiscard]] Result<Json> written_quantization(const Json& source) const {
    const std::vector<TurnedInputs> turned = wanted_.transform->turned_inputs(config_);
    return stored_config_json(
        {.transforms = turned.empty() ? source_transforms(source) : transform_config_json(turned)});
  }

  [[nodiscard]] DType dtype_of(const ModelTensor& tensor) const {
    const bool precise = wanted_.precise.contains(tensor.module);
    const auto found = matrices_.find(tensor.module);
    const TensorInfo* vector = reader_->find(tensor.name);
    const bool was_precise = found != matrices_.end()
                                 ? found->second->format() == "F32"
                                 : vector != nullptr && vector->dtype == DType::kF32;
    return precise || was_precise ? DType::kF32 : config_.dtype;
  }

  Status write(const ModelTensor& tensor, CheckpointWriter& writer) {
    if (wanted_.stop != nullptr && *wanted_.stop) {
      return make_error(StatusCode::kCancelled, "stopped");
    }
    NIBBLE_ASSIGN_OR_RETURN(
        const TensorFold fold,
        wanted_.transform->fold_of(
            tensor, [&](const std::string& name, int64_t n) { return vectors_->vector(name, n); }));
    return tensor.kind == TensorKind::kMatrix ? write_matrix(tensor, fold, writer)
                                              : write_vector(tensor, fold, writer);
  }

  Status write_vector(const ModelTensor& tensor, const TensorFold& fold, CheckpointWriter& writer) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<float> numbers,
                            vectors_->numbers(tensor.name, tensor.shape));
    const int64_t k = std::max(tensor.shape.back(), std::ssize(fold.column_order));
    if (fold.becomes_ones) {
      std::fill(numbers.begin(), numbers.end(), 1.0F);
    } else {
      fold_columns(fold, {numbers.data(), 0, std::ssize(numbers) / k, k}, pool_);
    }
    return write_numbers(tensor, numbers, writer);
  }

  Status write_matrix(const ModelTensor& tensor, const TensorFold& fold, CheckpointWriter& writer) {
    const auto found = matrices_.find(tensor.role == Role::kHead ? head_ : tensor.module);
    if (found == matrices_.end()) {
      return make_error(StatusCode::kNotFound, "{}: has no tensor {}", wanted_.source, tensor.name);
    }
    const SourceMatrix& matrix = *found->second;
    if (std::vector{matrix.n(), matrix.k()} != tensor.shape) {
      return make_error(StatusCode::kCorrupt, "{}: shape [{}, {}], but config.json says [{}, {}]",
                        matrix.where(), matrix.n(), matrix.k(), tensor.shape[0], tensor.shape[1]);
    }
    const int64_t n = matrix.n();
    const int64_t k = matrix.k();
    const bool whole = fold.row_rotation != nullptr || !fold.row_order.empty();
    const int64_t block = whole ? n : std::clamp<int64_t>(kBlockBytes / (4 * k), 1, n);
    std::vector<float> w(static_cast<size_t>(block * k));
    for (int64_t row = 0; row < n; row += block) {
      const Rows rows{w.data(), row, std::min(block, n - row), k};
      NIBBLE_RETURN_IF_ERROR(decode_once(matrix, *reader_, {row, rows.count}, w.data()));
      fold_columns(fold, rows, pool_);
      fold_rows(fold, rows, pool_);
      w.resize(static_cast<size_t>(rows.count * k));
      NIBBLE_RETURN_IF_ERROR(write_numbers(tensor, w, writer));
    }
    return {};
  }

  Status write_numbers(const ModelTensor& tensor,
                       const std::vector<float>& numbers,
                       CheckpointWriter& writer) {
    if (!std::ranges::all_of(numbers, [](float x) { return std::isfinite(x); })) {
      return make_error(StatusCode::kCorrupt,
                        "{}: tensor {} holds numbers that are infinite or none", wanted_.source,
                        tensor.name);
    }
    return writer.write_part(tensor.name,
                             stored(numbers.data(), std::ssize(numbers), dtype_of(tensor)));
  }

  ThreadPool pool_;
  const TransformedModel& wanted_;
  ModelConfig config_;
  WeightLoader* vectors_ = nullptr;
  const CheckpointReader* reader_ = nullptr;
  std::map<std::string, const SourceMatrix*, std::less<>> matrices_;
  std::string head_;
};

}  // namespace

bool has_stamp(const std::string& folder, const Json& stamp) {
  const std::string path = stamp_path(folder);
  if (!file_exists(path)) {
    return false;
  }
  const auto text = read_file(path);
  return text.ok() && *text == stamp.dump();
}

Status write_transformed_model(const TransformedModel& wanted) {
  if (has_stamp(wanted.destination, wanted.stamp)) {
    return {};
  }
  return Transformation(wanted).run();
}

}  // namespace nibble
