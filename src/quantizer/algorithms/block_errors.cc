#include "quantizer/algorithms/block_errors.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/check.h"
#include "quantizer/algorithms/activations.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

constexpr int64_t kHighWay = std::ssize(kClips);  // ways before are clips of the fewer bits
constexpr int64_t kWays = kHighWay + 1;
constexpr double kNotTried = std::numeric_limits<double>::infinity();
constexpr int64_t kDepth = 256;  // rows at a time

/// trace(W S W^T) of rows of `block` numbers that are `stride` apart.
double weighed(const float* w, int64_t n, int64_t stride, const float* sums, int64_t block) {
  double whole = 0;
  std::vector<float> products(static_cast<size_t>(block));
  for (int64_t row = 0; row < n; ++row) {
    const float* weights = w + row * stride;
    std::ranges::fill(products, 0.0F);
    for (int64_t i = 0; i < block; ++i) {
      const float* of = sums + i * block;
      for (int64_t j = 0; j < block; ++j) {
        products[static_cast<size_t>(j)] += weights[i] * of[j];
      }
    }
    for (int64_t j = 0; j < block; ++j) {
      whole +=
          static_cast<double>(products[static_cast<size_t>(j)]) * static_cast<double>(weights[j]);
    }
  }
  return whole;
}

}  // namespace

BlockErrors::BlockErrors(int64_t k, const BlockForm& form)
    : k_(k), block_(form.block), form_(form), sums_(static_cast<size_t>(kWays * k * form.block)) {
  CHECK_GT(block_, 0);
  CHECK_EQ(k % block_, 0);
  CHECK_EQ(block_ % rows::kLanes, 0);
}

void BlockErrors::find_largest(const float* x, int64_t rows, ThreadPool& pool) {
  largest_.resize(static_cast<size_t>(rows * scales_of_row()));
  const auto wider =
      static_cast<int64_t>(std::ceil(form_.outlier_share * static_cast<double>(blocks())));
  pool.parallel_for(rows, [&](int64_t row, int) {
    float* found = largest_.data() + row * scales_of_row();
    for (int64_t block = 0; block < blocks(); ++block) {
      found[block] = largest_magnitude(x + row * k_ + block * block_, block_);
    }
    std::vector<float> sorted(found, found + blocks());
    std::ranges::sort(sorted, std::greater());
    found[blocks()] = sorted[static_cast<size_t>(std::min(wider, blocks() - 1))];
    found[blocks() + 1] = sorted.front();
  });
}

float BlockErrors::largest(int64_t row, int64_t block, int bits) const {
  const float* found = largest_.data() + row * scales_of_row();
  if (form_.scales == BlockScales::kEach || bits == 16) {
    return found[block];
  }
  return found[blocks() + (bits == low_bits(form_.scales) ? 0 : 1)];
}

bool BlockErrors::tries(int64_t way) const {
  return low_bits(form_.scales) == 4 || way >= kHighWay - 1;  // 8 bits are not clipped
}

void BlockErrors::round(int64_t way, int64_t row, int64_t block, float* x) const {
  const int bits = low_bits(form_.scales) * (way == kHighWay ? 2 : 1);
  const float most = largest(row, block, bits);
  if (bits == 16) {
    return round_to_fixed(fixed_unit(most), x, block_);
  }
  const float clip = bits == 4 ? kClips.at(static_cast<size_t>(way)) : 1.0F;
  round_block(block_codes(bits, clip, most), x, block_);
}

void BlockErrors::add(const float* x, int64_t count, ThreadPool& pool) {
  const rows::RowKernels& kernels = *rows::find_row_kernels("auto").value();
  find_largest(x, count, pool);
  pool.parallel_for(blocks(), [&](int64_t index, int) {
    std::vector<float> changes(static_cast<size_t>(kDepth * block_));
    for (int64_t way = 0; way < kWays; ++way) {
      if (!tries(way)) {
        continue;
      }
      float* sums = sums_.data() + (index * kWays + way) * block_ * block_;
      for (int64_t begin = 0; begin < count; begin += kDepth) {
        const int64_t depth = std::min(kDepth, count - begin);
        for (int64_t row = 0; row < depth; ++row) {
          const float* from = x + (begin + row) * k_ + index * block_;
          float* to = changes.data() + row * block_;
          std::copy_n(from, block_, to);
          round(way, begin + row, index, to);
          for (int64_t i = 0; i < block_; ++i) {
            to[i] = from[i] - to[i];
          }
        }
        kernels.add_products({.a = changes.data(),
                              .a_stride = block_,
                              .b = changes.data(),
                              .b_stride = block_,
                              .c = sums,
                              .c_stride = block_,
                              .m = block_,
                              .n = block_,
                              .depth = depth});
      }
    }
  });
}

void BlockErrors::add_costs(const float* w, int64_t n, BlockCosts& costs, ThreadPool& pool) const {
  costs.low.resize(static_cast<size_t>(blocks()));
  costs.high.resize(static_cast<size_t>(blocks()));
  pool.parallel_for(blocks(), [&](int64_t index, int) {
    for (int64_t way = 0; way < kWays; ++way) {
      const float* sums = sums_.data() + (index * kWays + way) * block_ * block_;
      const auto at = static_cast<size_t>(index);
      double& cost = way == kHighWay ? costs.high[at] : costs.low[at].at(static_cast<size_t>(way));
      if (tries(way)) {
        cost += weighed(w + index * block_, n, k_, sums, block_);
      } else {
        cost = kNotTried;
      }
    }
  });
}

}  // namespace nibble
