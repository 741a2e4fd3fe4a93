#include "quantizer/algorithms/refine.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>

#include "base/check.h"
#include "base/f16.h"
#include "base/math.h"
#include "quant/code_traits.h"
#include "quantizer/algorithms/row_tile.h"

namespace nibble {
namespace {

constexpr int64_t kRows = RowTile::kRows;
constexpr int64_t kColumns = 128;  // of a block, at most
constexpr int kTurns = 4;          // 12 gain another half percent of the loss

rows::RowKernels::Sweep sweep_of(const rows::RowKernels& kernels, const WeightFormat& format) {
  if (format.code == WeightCode::kFp4E2M1) {
    return kernels.sweep_fp4;
  }
  CHECK(is_integer(format.code));
  if (format.zero_points == ZeroPoints::kPerScale) {
    return kernels.sweep_int4_zeros;
  }
  return format.code == WeightCode::kInt4 ? kernels.sweep_int4 : kernels.sweep_int8;
}

/// Improves the rows of a tile, block by block of columns: what changed in others is taken into
/// account by computing a block's gradients when its turn comes.
class Refiner final {
 public:
  Refiner(const MatrixToRound& matrix, const SiteStatistics& site, const RowTile::Loss& loss)
      : tile_(matrix, site, loss),
        sweep_(sweep_of(tile_.kernels(), matrix.format)),
        fits_scales_(fits_scales(matrix)),
        wide_(tile_.width() > kColumns),
        steps_(static_cast<size_t>(tile_.width() * kRows)),
        products_(steps_.size()) {}

  void run(int64_t first, RoundedMatrix& rounded) {
    tile_.load(first, rounded);
    tile_.update_errors({0, tile_.k()});
    const int64_t columns = wide_ ? kColumns : kColumns / tile_.width() * tile_.width();
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int64_t group = 0; fits_scales_ && wide_ && group < tile_.groups(); ++group) {
        find_gradients(columns_of(group));
        fit_scale(group);
      }
      for (int64_t begin = 0; begin < tile_.k(); begin += columns) {
        improve({begin, std::min(columns, tile_.k() - begin)});
      }
    }
    tile_.store(rounded);
  }

 private:
  [[nodiscard]] RowTile::Columns columns_of(int64_t group) const {
    return {group * tile_.width(), tile_.width()};
  }

  void find_gradients(const RowTile::Columns& of) {
    for (int64_t i = 0; i < of.count; i += kColumns) {
      tile_.find_gradients({of.begin + i, std::min(kColumns, of.count - i)});
    }
  }

  /// The scales of the groups in a block, then its codes.
  void improve(const RowTile::Columns& block) {
    tile_.find_gradients(block);
    for (int64_t i = 0; fits_scales_ && !wide_ && i < block.count; i += tile_.width()) {
      const int64_t group = (block.begin + i) / tile_.width();
      fit_scale(group);
      tile_.add_products(block, columns_of(group), changes_.data(),
                         tile_.gradients() + block.begin * kRows);
    }
    sweep(block);
    tile_.update_errors(block);
  }

  void sweep(const RowTile::Columns& block) {
    const float* scales[kColumns];
    const float* zeros[kColumns];
    for (int64_t j = 0; j < block.count; ++j) {
      const int64_t group = (block.begin + j) / tile_.width();
      scales[j] = tile_.scales() + group * kRows;
      zeros[j] = tile_.zeros() + group * kRows;
    }
    const int64_t stride = tile_.gram().stride();
    sweep_({.gradients = tile_.gradients() + block.begin * kRows,
            .values = tile_.values() + block.begin * kRows,
            .changes = changes_.data(),
            .scales = scales,
            .zeros = tile_.has_zeros() ? zeros : nullptr,
            .gram = tile_.gram().data() + block.begin * stride + block.begin,
            .gram_stride = stride,
            .damping = tile_.damping(),
            .columns = block.count,
            .rows = kRows});
  }

  /// A group's scale, given all codes and the gradients of its columns. Of groups that lie in a
  /// block changes_ are then those of their errors, and the damping's part of them is added to the
  /// gradients.
  void fit_scale(int64_t group) {
    const RowTile::Columns columns = columns_of(group);
    float* scales = tile_.scales() + group * kRows;
    float* values = tile_.values() + columns.begin * kRows;
    float* gradients = tile_.gradients() + columns.begin * kRows;
    for (int64_t i = 0; i < columns.count * kRows; ++i) {
      steps_[static_cast<size_t>(i)] = std::nearbyint(values[i] / scales[i % kRows]);
    }
    multiply_steps(columns);
    double slopes[kRows] = {};
    double curvatures[kRows] = {};
    for (int64_t i = 0; i < columns.count * kRows; ++i) {
      const double step = steps_[static_cast<size_t>(i)];
      slopes[i % kRows] += step * gradients[i];
      curvatures[i % kRows] +=
          step * (products_[static_cast<size_t>(i)] + static_cast<double>(tile_.damping()) * step);
    }
    float moved[kRows];
    for (int64_t row = 0; row < kRows; ++row) {
      const float fitted = better_scale(scales[row], slopes[row], curvatures[row]);
      moved[row] = scales[row] - fitted;
      scales[row] = fitted;
    }
    for (int64_t i = 0; i < columns.count * kRows; ++i) {
      const float before = values[i];
      values[i] =
          moved[i % kRows] == 0 ? before : steps_[static_cast<size_t>(i)] * scales[i % kRows];
      if (!wide_) {
        const float change = before - values[i];
        changes_[static_cast<size_t>(i)] = change;
        gradients[i] += tile_.damping() * change;
      }
    }
    if (wide_) {
      tile_.update_errors(columns);
    }
  }

  /// products := H steps, within the columns of a group.
  void multiply_steps(const RowTile::Columns& columns) {
    std::fill(products_.begin(), products_.end(), 0.0F);
    for (int64_t i = 0; i < columns.count; i += kColumns) {
      tile_.add_products({columns.begin + i, std::min(kColumns, columns.count - i)}, columns,
                         steps_.data(), products_.data() + i * kRows);
    }
  }

  /// The loss changes by -2 slope d + curvature d^2 with a scale that is larger by d.
  [[nodiscard]] float better_scale(float scale, double slope, double curvature) const {
    const auto wanted = static_cast<float>(scale + slope / curvature);
    const float stored =
        tile_.format().scale_dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(wanted)) : wanted;
    const double moved = static_cast<double>(stored) - scale;
    const bool near = stored / scale > 0.5F && stored / scale < 2.0F;
    const bool better = moved * (moved * curvature - 2 * slope) < 0;
    return near && better && std::isfinite(stored * 128) ? stored : scale;
  }

  RowTile tile_;
  rows::RowKernels::Sweep sweep_;
  bool fits_scales_;
  bool wide_;                    // groups have more columns than a block
  std::vector<float> steps_;     // [width, kRows]: codes less their zero points
  std::vector<float> products_;  // [width, kRows]
  std::array<float, static_cast<size_t>(kColumns* kRows)> changes_{};  // of a group or block
};

}  // namespace

bool fits_scales(const MatrixToRound& matrix) {
  return is_integer(matrix.format.code) && !matrix.encoder->ties_scales();
}

void refine(const MatrixToRound& matrix,
            const SiteStatistics& site,
            RoundedMatrix& rounded,
            ThreadPool& pool) {
  const RowTile::Loss loss{.damping = site.factor->damping,
                           .with_drift = rounded.rounding == Rounding::kGptaq};
  std::vector<std::unique_ptr<Refiner>> work(static_cast<size_t>(pool.threads()));
  pool.parallel_for(ceil_div(matrix.n, kRows), [&](int64_t piece, int thread) {
    auto& mine = work[static_cast<size_t>(thread)];
    if (mine == nullptr) {
      mine = std::make_unique<Refiner>(matrix, site, loss);
    }
    mine->run(piece * kRows, rounded);
  });
}

}  // namespace nibble
