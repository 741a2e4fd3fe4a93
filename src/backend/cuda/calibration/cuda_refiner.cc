#include "backend/cuda/calibration/cuda_refiner.h"

#include <algorithm>

#include "backend/cuda/calibration/column_rows.cuh"
#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {
namespace {

constexpr int kTurns = 4;  // as refine()

StoredScale stored_scale(const WeightFormat& format) {
  return format.scale_dtype == DType::kBF16 ? StoredScale::kBf16 : StoredScale::kF32;
}

}  // namespace

// What holds the values row by row holds the gradients, and at last the values again.
CudaRefiner::CudaRefiner(CalibrationWork& work, const MatrixToRefine& matrix)
    : work_(work),
      matrix_(matrix),
      width_(matrix.k / matrix.groups),
      fits_blocks_(matrix.fits_scales && width_ <= kColumnBlock),
      values_(work.turned.as<float>()),
      gradients_(work.values.as<float>()),
      spare_(work.sums.as<float>()) {
  CHECK(matrix.groups == 1 || width_ % kColumnPart == 0);
  if (matrix.fits_scales && width_ > kColumnBlock) {
    must(work.room(work.products, matrix.k * matrix.stride * 4, "products of a refinement"));
    must(work.room(work.moved, matrix.stride * 4, "scales of a refinement"));
  }
  if (fits_blocks_) {
    must(work.room(work.products, kColumnBlock * matrix.stride * 4, "changes of a refinement"));
  }
}

void CudaRefiner::run() {
  load();
  const bool wide = width_ > kColumnBlock;
  const int64_t columns = wide ? kColumnBlock : kColumnBlock / width_ * width_;  // whole groups
  for (int turn = 0; turn < kTurns; ++turn) {
    for (int64_t group = 0; wide && matrix_.fits_scales && group < matrix_.groups; ++group) {
      fit_wide_group(group);
    }
    for (int64_t begin = 0; begin < matrix_.k; begin += columns) {
      improve({begin, std::min(columns, matrix_.k - begin)});
    }
  }
  store();
}

void CudaRefiner::load() {
  TurnArgs turn{.from = work_.values.as<float>(),
                .rows = matrix_.n,
                .k = matrix_.k,
                .to = values_,
                .stride = matrix_.stride};
  must(turn_columns(turn, work_.stream), "turning a matrix");
  turn.from = work_.weights.as<float>();
  turn.to = spare_;
  must(turn_columns(turn, work_.stream), "turning a matrix");
  const int64_t count = matrix_.k * matrix_.stride;
  if (matrix_.drift != nullptr) {
    matrix_.drift->ask_gradients(spare_, matrix_.stride, gradients_);
  } else {
    must(cudaMemsetAsync(gradients_, 0, static_cast<size_t>(count) * sizeof(float), work_.stream),
         "gradients");
  }
  must(subtract(spare_, values_, count, spare_, work_.stream), "errors");
  must(add_scaled(spare_, matrix_.damping, count, gradients_, work_.stream), "gradients");
  multiply({.of = {0, matrix_.k}, .on = {0, matrix_.k}, .numbers = spare_, .to = gradients_});
}

void CudaRefiner::store() {
  TurnArgs turn{.from = values_,
                .rows = matrix_.n,
                .k = matrix_.k,
                .to = work_.values.as<float>(),
                .stride = matrix_.stride};
  must(turn_back_columns(turn, work_.stream), "turning a matrix");
  turn.from = work_.turned_scales.as<float>();
  turn.k = matrix_.groups;
  turn.to = work_.scales.as<float>();
  must(turn_back_columns(turn, work_.stream), "turning scales");
}

RefineBlockArgs CudaRefiner::block(const Columns& columns, float* changes) const {
  const auto [begin, count] = columns;
  return {.values = values_ + begin * matrix_.stride,
          .gradients = gradients_ + begin * matrix_.stride,
          .changes = changes,
          .scales = work_.turned_scales.as<float>(),
          .zeros = matrix_.has_zeros ? work_.turned_zeros.as<float>() : nullptr,
          .sums = matrix_.h + begin * matrix_.k + begin,
          .sums_stride = matrix_.k,
          .stride = matrix_.stride,
          .first = static_cast<int>(begin),
          .count = static_cast<int>(count),
          .width = static_cast<int>(width_),
          .damping = matrix_.damping};
}

void CudaRefiner::fit_wide_group(int64_t group) {
  const WideFitArgs args{.values = values_,
                         .gradients = gradients_,
                         .scales = work_.turned_scales.as<float>() + group * matrix_.stride,
                         .steps = spare_,
                         .products = work_.products.as<float>(),
                         .moved = work_.moved.as<float>(),
                         .k = matrix_.k,
                         .stride = matrix_.stride,
                         .begin = group * width_,
                         .width = width_,
                         .damping = matrix_.damping,
                         .type = stored_scale(matrix_.format)};
  must(take_steps(args, work_.stream), "steps of codes");
  multiply({.of = {args.begin, width_},
            .on = {0, matrix_.k},
            .numbers = spare_,
            .to = work_.products.as<float>(),
            .beta = 0.0F});
  must(fit_wide(args, work_.stream), "fitting scales");
}

void CudaRefiner::improve(const Columns& columns) {
  auto* changes = work_.errors.as<float>();
  auto* fitted = work_.products.as<float>();
  if (fits_blocks_) {
    must(fit_block(block(columns, fitted), stored_scale(matrix_.format), work_.stream),
         "fitting scales");
    multiply({columns, columns, fitted, gradients_});
  }
  must(sweep_block(block(columns, changes), value_form(matrix_.format), work_.stream),
       "choosing codes anew");
  if (!fits_blocks_) {
    multiply({columns, {0, matrix_.k}, changes, gradients_});
    return;
  }
  multiply({columns, columns, changes, gradients_});
  must(add_scaled(fitted, 1.0, columns.count * matrix_.stride, changes, work_.stream), "changes");
  const int64_t end = columns.begin + columns.count;
  multiply({columns, {0, columns.begin}, changes, gradients_});
  multiply({columns, {end, matrix_.k - end}, changes, gradients_});
}

void CudaRefiner::multiply(const Product& product) {
  if (product.on.count == 0) {
    return;
  }
  work_.multiply({.transpose_b = true,
                  .m = matrix_.stride,
                  .n = product.on.count,
                  .k = product.of.count,
                  .lda = matrix_.stride,
                  .ldb = matrix_.k,
                  .ldc = matrix_.stride},
                 {.a = product.numbers,
                  .b = matrix_.h + product.of.begin * matrix_.k + product.on.begin,
                  .c = product.to + product.on.begin * matrix_.stride,
                  .beta = product.beta});
}

}  // namespace nibble::cuda
