// What a GPU's threads do to the rows of a matrix that is refined, one after the other on the host,
// beside refine().

#include "backend/cuda/calibration/refine_rows.cuh"

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "base/math.h"
#include "quant/code_traits.h"
#include "quantizer/algorithms/output_error.h"
#include "quantizer/algorithms/refine.h"
#include "quantizer/algorithms/testing/rounding_problem.h"

namespace nibble {
namespace {

constexpr int64_t kBlock = cuda::kSquarePitch;

/// CudaRefiner (backend/cuda/calibration/cuda_refiner.h) without a GPU.
class RowsOnHost final {
 public:
  RowsOnHost(const MatrixToRound& matrix, const SiteStatistics& site, RoundedMatrix& rounded)
      : matrix_(matrix),
        gram_(*site.gram),
        rounded_(rounded),
        groups_(std::max<int64_t>(matrix.format.groups(matrix.k), 1)),
        width_(matrix.k / groups_),
        stride_(round_up(matrix.n, int64_t{64})),
        damping_(static_cast<float>(site.factor->damping * site.gram->mean_diagonal())),
        values_(size_of(matrix.k)),
        gradients_(values_.size()),
        changes_(size_of(kBlock)),
        scales_(size_of(groups_), 1.0F),
        zeros_(scales_.size()),
        square_(static_cast<size_t>(kBlock * kBlock)),
        inverses_(static_cast<size_t>(kBlock)) {}

  void refine() {
    load();
    const int64_t whole = kBlock / width_ * width_;
    const int64_t columns = whole == 0 ? kBlock : whole;
    for (int turn = 0; turn < 4; ++turn) {
      for (int64_t begin = 0; fits_scales(matrix_) && whole == 0 && begin < matrix_.k;
           begin += width_) {
        fit_wide(begin);
      }
      for (int64_t begin = 0; begin < matrix_.k; begin += columns) {
        const int64_t count = std::min(columns, matrix_.k - begin);
        if (fits_scales(matrix_) && whole > 0) {
          fit(begin, count);
        }
        sweep(begin, count);
      }
    }
    store();
  }

 private:
  [[nodiscard]] size_t size_of(int64_t columns) const {
    return static_cast<size_t>(columns * stride_);
  }
  [[nodiscard]] float h(int64_t i, int64_t j) const { return gram_.data()[i * gram_.stride() + j]; }

  void load() {
    std::vector<float> errors(values_.size());
    for (int64_t row = 0; row < matrix_.n; ++row) {
      for (int64_t i = 0; i < matrix_.k; ++i) {
        const auto at = static_cast<size_t>(i * stride_ + row);
        values_[at] = rounded_.values[static_cast<size_t>(row * matrix_.k + i)];
        errors[at] = matrix_.w[row * matrix_.k + i] - values_[at];
        gradients_[at] = damping_ * errors[at];
      }
      for (int64_t g = 0; g < groups_; ++g) {
        const auto from = static_cast<size_t>(row * groups_ + g);
        scales_[static_cast<size_t>(g * stride_ + row)] = rounded_.scales[from];
        if (!rounded_.zeros.empty()) {
          zeros_[static_cast<size_t>(g * stride_ + row)] = rounded_.zeros[from];
        }
      }
    }
    spread(0, matrix_.k, errors);
  }

  void store() {
    for (int64_t row = 0; row < matrix_.n; ++row) {
      for (int64_t i = 0; i < matrix_.k; ++i) {
        rounded_.values[static_cast<size_t>(row * matrix_.k + i)] =
            values_[static_cast<size_t>(i * stride_ + row)];
      }
      for (int64_t g = 0; g < groups_; ++g) {
        rounded_.scales[static_cast<size_t>(row * groups_ + g)] =
            scales_[static_cast<size_t>(g * stride_ + row)];
      }
    }
  }

  void spread(int64_t begin, int64_t count, const std::vector<float>& changes) {
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t j = 0; j < matrix_.k; ++j) {
        for (int64_t row = 0; row < matrix_.n; ++row) {
          gradients_[static_cast<size_t>(j * stride_ + row)] +=
              changes[static_cast<size_t>(t * stride_ + row)] * h(begin + t, j);
        }
      }
    }
  }

  cuda::RefineBlockArgs block(int64_t begin, int64_t count) {
    for (int64_t i = 0; i < kBlock; ++i) {
      for (int64_t j = 0; j < kBlock; ++j) {
        square_[static_cast<size_t>(i * kBlock + j)] =
            i <= j && j < count ? h(begin + i, begin + j) : 0.0F;
      }
      inverses_[static_cast<size_t>(i)] =
          1.0F / (square_[static_cast<size_t>(i * kBlock + i)] + damping_);
    }
    return {.values = values_.data() + begin * stride_,
            .gradients = gradients_.data() + begin * stride_,
            .changes = changes_.data(),
            .scales = scales_.data(),
            .zeros = rounded_.zeros.empty() ? nullptr : zeros_.data(),
            .stride = stride_,
            .first = static_cast<int>(begin),
            .count = static_cast<int>(count),
            .width = static_cast<int>(width_),
            .damping = damping_};
  }

  [[nodiscard]] cuda::StoredScale stored() const {
    return matrix_.format.scale_dtype == DType::kBF16 ? cuda::StoredScale::kBf16
                                                      : cuda::StoredScale::kF32;
  }

  void fit(int64_t begin, int64_t count) {
    const cuda::RefineBlockArgs args = block(begin, count);
    for (int64_t row = 0; row < stride_; ++row) {
      cuda::RowFit{args, square_.data(), stored()}.run(row);
    }
    spread(begin, count, changes_);
  }

  void fit_wide(int64_t begin) {
    for (int64_t row = 0; row < matrix_.n; ++row) {
      float& scale = scales_[static_cast<size_t>(begin / width_ * stride_ + row)];
      std::vector<float> steps;
      for (int64_t i = begin; i < begin + width_; ++i) {
        steps.push_back(std::nearbyint(values_[static_cast<size_t>(i * stride_ + row)] / scale));
      }
      std::vector<float> products(static_cast<size_t>(matrix_.k));
      cuda::ScaleLoss loss;
      for (int64_t i = 0; i < matrix_.k; ++i) {
        for (int64_t t = 0; t < width_; ++t) {
          products[static_cast<size_t>(i)] += steps[static_cast<size_t>(t)] * h(begin + t, i);
        }
      }
      for (int64_t t = 0; t < width_; ++t) {
        const double step = steps[static_cast<size_t>(t)];
        loss.slope += step * gradients_[static_cast<size_t>((begin + t) * stride_ + row)];
        loss.curvature += step * (products[static_cast<size_t>(begin + t)] + damping_ * step);
      }
      const float fitted = loss.better(scale, stored());
      for (int64_t i = 0; i < matrix_.k; ++i) {
        const auto at = static_cast<size_t>(i * stride_ + row);
        gradients_[at] += (scale - fitted) * products[static_cast<size_t>(i)];
        if (i >= begin && i < begin + width_) {
          const float before = values_[at];
          values_[at] = steps[static_cast<size_t>(i - begin)] * fitted;
          gradients_[at] += damping_ * (before - values_[at]);
        }
      }
      scale = fitted;
    }
  }

  template <typename Codec>
  void sweep_rows(const cuda::RefineBlockArgs& args, const Codec& codec) {
    for (int64_t row = 0; row < stride_; ++row) {
      cuda::RowSweep<Codec>{args, square_.data(), inverses_.data(), codec}.run(row);
    }
  }

  void sweep(int64_t begin, int64_t count) {
    const cuda::RefineBlockArgs args = block(begin, count);
    const CodeTraits& traits = code_traits(matrix_.format.code);
    if (matrix_.format.code == WeightCode::kFp4E2M1) {
      sweep_rows(args, cuda::Fp4Codec{});
    } else {
      sweep_rows(args,
                 cuda::IntCodec{static_cast<float>(traits.low), static_cast<float>(traits.high)});
    }
    spread(begin, count, changes_);
  }

  const MatrixToRound& matrix_;
  const Gram& gram_;
  RoundedMatrix& rounded_;
  int64_t groups_;
  int64_t width_;
  int64_t stride_;
  float damping_;
  std::vector<float> values_;     // [k, stride]
  std::vector<float> gradients_;  // [k, stride]
  std::vector<float> changes_;    // [kBlock, stride]
  std::vector<float> scales_;     // [groups, stride]
  std::vector<float> zeros_;      // [groups, stride]
  std::vector<float> square_;     // [kBlock, kBlock]
  std::vector<float> inverses_;   // [kBlock]
};

TEST(RefineRows, BetterCodesAndScalesAsRefineDoes) {
  ThreadPool pool(2);
  uint32_t seed = 30;
  for (const QuantScheme& scheme : schemes()) {
    const int group = scheme.weight.group_size;
    for (const int64_t k : {group > 32 ? 384 : group > 0 ? 352 : 360, group > 0 ? group : 40}) {
      const Problem problem(scheme, 35, k, ++seed);
      const Gram gram = gram_of(correlated(2 * k, k, ++seed), k, pool);
      const SiteStatistics site = make_site_statistics(gram, Rounding::kGptq, pool);
      const RoundedMatrix columns = by_columns(problem, Rounding::kGptq, site, pool);
      RoundedMatrix wanted = columns;
      refine(problem.matrix, site, wanted, pool);
      RoundedMatrix found = columns;
      RowsOnHost(problem.matrix, site, found).refine();
      const auto loss = [&](const RoundedMatrix& rounded) {
        double sum = output_error(gram, {problem.w.data(), rounded.values.data(), 35}, pool);
        for (size_t i = 0; i < problem.w.size(); ++i) {
          const double e = static_cast<double>(problem.w[i]) - rounded.values[i];
          sum += site.factor->damping * gram.mean_diagonal() * e * e;
        }
        return sum;
      };
      EXPECT_LT(loss(found), loss(columns)) << scheme.name << " " << k;
      EXPECT_NEAR(loss(found) / loss(wanted), 1, 1e-3) << scheme.name << " " << k;
      size_t equal = 0;
      for (size_t i = 0; i < found.values.size(); ++i) {
        equal += std::fabs(found.values[i] - wanted.values[i]) <
                         1e-3F * std::fabs(wanted.values[i]) + 1e-6F
                     ? 1
                     : 0;
      }
      // A tie that is decided otherwise moves what comes after it.
      EXPECT_GT(equal, found.values.size() * 9 / 10) << scheme.name << " " << k;
    }
  }
}

TEST(RefineRows, KeepAScaleThatCannotBeBettered) {
  using cuda::ScaleLoss;
  using cuda::StoredScale;
  EXPECT_EQ((ScaleLoss{0, 0}.better(0.5F, StoredScale::kF32)), 0.5F);
  EXPECT_EQ((ScaleLoss{1, 8}.better(0.5F, StoredScale::kF32)), 0.625F);
  EXPECT_EQ((ScaleLoss{1, 1024}.better(0.5F, StoredScale::kBf16)), 0.5F);  // less than half a step
  EXPECT_EQ((ScaleLoss{3, 1024}.better(0.5F, StoredScale::kBf16)), 0.5F + 0x1p-8F);
  EXPECT_EQ((ScaleLoss{9, 1}.better(0.5F, StoredScale::kF32)), 0.5F);  // too far
  EXPECT_EQ((ScaleLoss{INFINITY, 1}.better(0.5F, StoredScale::kF32)), 0.5F);
  EXPECT_TRUE(std::isnan(cuda::nearest_bf16(NAN)));
}

}  // namespace
}  // namespace nibble
