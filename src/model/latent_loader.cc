#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/f16.h"
#include "model/layer_loader.h"
#include "quant/codec.h"

namespace nibble {
namespace {

/// Rows of the stored matrix that are decoded at a time.
constexpr int64_t kRowsAtOnce = 16;

/// Rows of a stored matrix in numbers T: as the matrix has them, or decoded and rounded to T.
template <typename T>
class StoredRows {
 public:
  explicit StoredRows(const QuantTensor& stored) : stored_(stored) {
    if (!as_they_are()) {
      decoded_.resize(static_cast<size_t>(kRowsAtOnce * stored.k));
      rounded_.resize(kBf16 ? decoded_.size() : 0);
    }
  }

  /// Up to kRowsAtOnce of them; valid until the next call.
  const T* rows(int64_t first, int64_t count) {
    if (as_they_are()) {
      return stored_.codes.as<T>().data() + first * stored_.k;
    }
    for (int64_t i = 0; i < count; ++i) {
      decode_row(stored_, first + i, decoded_.data() + i * stored_.k);
    }
    if constexpr (kBf16) {
      std::ranges::transform(decoded_, rounded_.begin(), f32_to_bf16);
      return rounded_.data();
    } else {
      return decoded_.data();
    }
  }

 private:
  static constexpr bool kBf16 = std::is_same_v<T, uint16_t>;

  [[nodiscard]] bool as_they_are() const {
    return stored_.format.code == (kBf16 ? WeightCode::kBf16 : WeightCode::kF32);
  }

  const QuantTensor& stored_;
  std::vector<float> decoded_;
  std::vector<T> rounded_;
};

/// Rows [count, k] become neighbouring columns of a matrix of n columns.
template <typename T>
void transpose_rows(const T* rows, int64_t count, int64_t k, T* out, int64_t n) {
  for (int64_t column = 0; column < k; ++column) {
    for (int64_t row = 0; row < count; ++row) {
      out[column * n + row] = rows[row * k + column];
    }
  }
}

/// A head's rows of the stored matrix, from first_row on: those that make keys transposed, as
/// queries are multiplied by them, then those that make values. T: the model's numbers.
template <typename T>
void split_head(const QuantTensor& stored,
                int64_t first_row,
                QuantTensor& keys,
                QuantTensor& values) {
  StoredRows<T> source(stored);
  const auto for_rows = [&](int64_t first, int64_t rows, const auto& take) {
    for (int64_t row = 0; row < rows; row += kRowsAtOnce) {
      const int64_t count = std::min(kRowsAtOnce, rows - row);
      take(source.rows(first + row, count), row, count);
    }
  };
  for_rows(first_row, keys.k, [&](const T* rows, int64_t row, int64_t count) {
    transpose_rows(rows, count, stored.k, keys.codes.as<T>().data() + row, keys.k);
  });
  for_rows(first_row + keys.k, values.n, [&](const T* rows, int64_t row, int64_t count) {
    std::copy_n(rows, count * stored.k, values.codes.as<T>().data() + row * stored.k);
  });
}

}  // namespace

/// The matrix that makes keys and values of the cached rows, in two for each head: absorbed
/// attention multiplies queries by the first, transposed, and results by the second. Whatever the
/// file stores is decoded.
Result<LayerLoader::LatentHeads> LayerLoader::latent_heads(int64_t layer) {
  const LatentConfig& form = config_.latent;
  const std::string module = name(Role::kLatentUp, layer);
  const int64_t of_head = form.nope_dim + form.value_dim;
  NIBBLE_ASSIGN_OR_RETURN(MappedLinear mapped,
                          weights_.linear(module, config_.num_heads * of_head, form.kv_rank));
  if (mapped.act.columns != nullptr) {
    return make_error(StatusCode::kUnsupported,
                      "{}: its columns lie in the order of GPTQ's act-order, which this build does "
                      "not put back here; quantize without act-order",
                      module);
  }
  note_scheme(mapped);
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor stored, copy_of(mapped.weight));
  std::vector<QuantTensor> keys;
  std::vector<QuantTensor> values;
  const bool bf16 = config_.dtype == DType::kBF16;
  const WeightFormat plain{.code = bf16 ? WeightCode::kBf16 : WeightCode::kF32};
  for (int64_t head = 0; head < config_.num_heads; ++head) {
    NIBBLE_ASSIGN_OR_RETURN(keys.emplace_back(),
                            QuantTensor::allocate(plain, form.kv_rank, form.nope_dim));
    NIBBLE_ASSIGN_OR_RETURN(values.emplace_back(),
                            QuantTensor::allocate(plain, form.value_dim, form.kv_rank));
    const auto split = bf16 ? split_head<uint16_t> : split_head<float>;
    split(stored, head * of_head, keys.back(), values.back());
  }
  weights_.release({&mapped, 1});
  const ActFormat act = bf16 ? ActFormat::kBf16 : ActFormat::kFloat;
  const auto prepare = [&](const std::vector<QuantTensor>& heads) {
    std::vector<QuantView> views;
    for (const QuantTensor& head : heads) {
      views.push_back(view_of(head));
      views.back().name = module;
    }
    return backend_.prepare_heads(views, act, max_rows_);
  };
  LatentHeads heads;
  NIBBLE_ASSIGN_OR_RETURN(heads.keys, prepare(keys));
  NIBBLE_ASSIGN_OR_RETURN(heads.values, prepare(values));
  return heads;
}

Result<LatentAttention> LayerLoader::latent_attention(int64_t layer) {
  const LatentConfig& form = config_.latent;
  const int64_t hidden = config_.hidden_size;
  const int64_t queries = config_.num_heads * form.query_dim();
  const bool staged = form.q_rank > 0;
  NIBBLE_ASSIGN_OR_RETURN(Norm norm, this->norm(name(Role::kAttentionNorm, layer), hidden));
  const Projection first =
      staged ? Projection{Role::kQueryDown, form.q_rank} : Projection{Role::kQuery, queries};
  NIBBLE_ASSIGN_OR_RETURN(Linear down, stacked(layer, {first, {Role::kLatentDown, form.row_dim()}},
                                               hidden, Bias::kNone));
  std::optional<Norm> q_norm;
  std::optional<Linear> q_up;
  if (staged) {
    NIBBLE_ASSIGN_OR_RETURN(q_norm, this->norm(name(Role::kQueryDownNorm, layer), form.q_rank));
    NIBBLE_ASSIGN_OR_RETURN(q_up,
                            stacked(layer, {{Role::kQueryUp, queries}}, form.q_rank, Bias::kNone));
  }
  NIBBLE_ASSIGN_OR_RETURN(Norm latent_norm,
                          this->norm(name(Role::kLatentNorm, layer), form.kv_rank));
  NIBBLE_ASSIGN_OR_RETURN(LatentHeads heads, latent_heads(layer));
  NIBBLE_ASSIGN_OR_RETURN(Linear output, stacked(layer, {{Role::kAttentionOutput, hidden}},
                                                 config_.num_heads * form.value_dim, Bias::kNone));
  return LatentAttention({.norm = std::move(norm),
                          .down = std::move(down),
                          .q_norm = std::move(q_norm),
                          .q_up = std::move(q_up),
                          .latent_norm = std::move(latent_norm),
                          .keys = std::move(heads.keys),
                          .values = std::move(heads.values),
                          .output = std::move(output)},
                         config_, rope_);
}

}  // namespace nibble
