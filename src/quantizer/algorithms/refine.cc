#include "quantizer/algorithms/refine.h"

#include <algorithm>
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
constexpr int64_t kColumns = 128;  // of a block
constexpr int64_t kDepth = 256;    // columns of a sum in single precision
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

/// Improves the rows of a tile.
class Refiner final {
 public:
  Refiner(const MatrixToRound& matrix, const SiteStatistics& site, const RowTile::Loss& loss)
      : tile_(matrix, site, loss),
        sweep_(sweep_of(tile_.kernels(), matrix.format)),
        fits_scales_(fits_scales(matrix)),
        changes_(static_cast<size_t>(std::max(kColumns, tile_.width()) * kRows)),
        steps_(static_cast<size_t>(tile_.width() * kRows)),
        products_(steps_.size()) {}

  void run(int64_t first, RoundedMatrix& rounded) {
    tile_.load(first, rounded);
    tile_.find_gradients();
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int64_t group = 0; fits_scales_ && group < tile_.groups(); ++group) {
        fit_scale(group);
      }
      sweep();
    }
    tile_.store(rounded);
  }

 private:
  void sweep() {
    for (int64_t begin = 0; begin < tile_.k(); begin += kColumns) {
      const int64_t count = std::min(kColumns, tile_.k() - begin);
      const float* scales[kColumns];
      const float* zeros[kColumns];
      for (int64_t j = 0; j < count; ++j) {
        const int64_t group = (begin + j) / tile_.width();
        scales[j] = tile_.scales() + group * kRows;
        zeros[j] = tile_.zeros() + group * kRows;
      }
      const int64_t stride = tile_.gram().stride();
      sweep_({.gradients = tile_.gradients() + begin * kRows,
              .values = tile_.values() + begin * kRows,
              .changes = changes_.data(),
              .scales = scales,
              .zeros = tile_.has_zeros() ? zeros : nullptr,
              .gram = tile_.gram().data() + begin * stride + begin,
              .gram_stride = stride,
              .damping = tile_.damping(),
              .columns = count,
              .rows = kRows});
      tile_.spread({begin, count}, changes_.data(), {0, begin});
      tile_.spread({begin, count}, changes_.data(), {begin + count, tile_.k() - begin - count});
    }
  }

  /// A group's scale, given all codes.
  void fit_scale(int64_t group) {
    const int64_t width = tile_.width();
    const int64_t begin = group * width;
    float* scales = tile_.scales() + group * kRows;
    float* values = tile_.values() + begin * kRows;
    float* gradients = tile_.gradients() + begin * kRows;
    for (int64_t i = 0; i < width * kRows; ++i) {
      steps_[static_cast<size_t>(i)] = std::nearbyint(values[i] / scales[i % kRows]);
    }
    multiply_steps(begin);
    double slopes[kRows] = {};
    double curvatures[kRows] = {};
    for (int64_t i = 0; i < width * kRows; ++i) {
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
    for (int64_t i = 0; i < width * kRows; ++i) {
      const float step = steps_[static_cast<size_t>(i)];
      const float before = values[i];
      values[i] = moved[i % kRows] == 0 ? before : step * scales[i % kRows];
      const float change = before - values[i];
      changes_[static_cast<size_t>(i)] = change;
      gradients[i] += tile_.damping() * change;
    }
    for (int64_t t = 0; t < width; t += kDepth) {
      tile_.spread({begin + t, std::min(kDepth, width - t)}, changes_.data() + t * kRows,
                   {0, tile_.k()});
    }
  }

  /// products := H steps, within the columns of a group.
  void multiply_steps(int64_t begin) {
    const int64_t width = tile_.width();
    const Gram& gram = tile_.gram();
    std::fill(products_.begin(), products_.end(), 0.0F);
    for (int64_t t = 0; t < width; t += kDepth) {
      tile_.kernels().add_products({.a = gram.data() + (begin + t) * gram.stride() + begin,
                                    .a_stride = gram.stride(),
                                    .b = steps_.data() + t * kRows,
                                    .b_stride = kRows,
                                    .c = products_.data(),
                                    .c_stride = kRows,
                                    .m = width,
                                    .n = kRows,
                                    .depth = std::min(kDepth, width - t)});
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
  std::vector<float> changes_;   // [width or kColumns, kRows]
  std::vector<float> steps_;     // [width, kRows]: codes less their zero points
  std::vector<float> products_;  // [width, kRows]
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
