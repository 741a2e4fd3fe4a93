#include "backend/cuda/packed_matrices.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/row_kernels.h"
#include "backend/prepared_gemm.h"
#include "base/check.h"
#include "base/math.h"
#include "quant/levels.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kAlignment = 128;  // of every matrix: kernels copy so many bytes at a time
constexpr size_t kStagedAlignment = 256;
// Codes that are on their way at once: several of the pieces that an Uploader sends.
constexpr size_t kStagedCodes = size_t{128} << 20;
constexpr const char* kPacking = "packing weights";

/// What lies behind the scales, if anything.
WeightField behind_scales(ZeroPoints zero_points) {
  return zero_points == ZeroPoints::kMinimum ? WeightField::kMinimums : WeightField::kZeros;
}

}  // namespace

GemmScratch::Rows scratch_rows(const GemmProblem& problem, int64_t max_m) {
  // Scales of blocks lie token by token, and products read those of whole tiles of tokens.
  constexpr int64_t kMostTileTokens = 128;
  const bool of_blocks = problem.act == ActFormat::kIntBlocks;
  return {.m = of_blocks ? int_scale_stride(max_m) + kMostTileTokens : max_m,
          .k = problem.act == ActFormat::kBf16Blocks ? most_wide_row_numbers(problem.k) : problem.k,
          .row_scales = row_scales(problem.act, problem.k)};
}

PackedMatrices::PackedMatrices(const Product& product, const GemmContext& context)
    : problem_(product.problem),
      context_(context),
      name_(product.entry.name),
      count_(product.count) {}

Result<std::shared_ptr<PackedMatrices>> PackedMatrices::create(std::span<const QuantView> parts,
                                                               const Product& product,
                                                               const GemmContext& context) {
  std::shared_ptr<PackedMatrices> packed(new PackedMatrices(product, context));
  NIBBLE_ASSIGN_OR_RETURN(packed->kernel_, product.entry.make(product.problem, context.device));
  NIBBLE_RETURN_IF_ERROR(context.scratch.reserve(scratch_rows(product.problem, product.max_m),
                                                 packed->kernel_->workspace_bytes(product.max_m)));
  const int64_t bytes = packed->matrix_bytes();
  packed->stride_ = round_up(bytes, kAlignment);
  NIBBLE_ASSIGN_OR_RETURN(
      packed->memory_,
      allocate_device(static_cast<size_t>((product.count - 1) * packed->stride_ + bytes),
                      product.count == 1 ? "a weight matrix" : "the experts of a layer"));
  NIBBLE_RETURN_IF_ERROR(packed->load(parts));
  return packed;
}

size_t PackedMatrices::staged_code_bytes() const {
  const int64_t row_bytes = QuantTensor::code_row_bytes(problem_.weight.code, problem_.k);
  return round_up(static_cast<size_t>(problem_.n * row_bytes), kStagedAlignment);
}

size_t PackedMatrices::staged_number_bytes() const {
  const int64_t fields = problem_.weight.zero_points == ZeroPoints::kNone ? 1 : 2;
  const int64_t numbers = fields * problem_.n * problem_.weight.groups(problem_.k);
  return round_up(static_cast<size_t>(numbers) * sizeof(float), kStagedAlignment);
}

Status PackedMatrices::send(const WeightStream& stream, void* to) const {
  return context_.uploader.upload(
      stream.bytes(),
      [&](size_t begin, size_t count, std::byte* out) { stream.write(begin, count, out); }, to);
}

Status PackedMatrices::check_numbers(const QuantView& part) const {
  return in_two_levels(problem_.weight, problem_.act) ? check_levels(part) : Status();
}

Status PackedMatrices::load(std::span<const QuantView> parts) {
  const size_t of_each = parts.size() / static_cast<size_t>(count_);
  CHECK_EQ(of_each * static_cast<size_t>(count_), parts.size());
  for (const QuantView& part : parts) {
    NIBBLE_RETURN_IF_ERROR(check_numbers(part));
  }
  int64_t step = 1;
  if (!kernel_->packs_nothing()) {
    step = std::clamp<int64_t>(static_cast<int64_t>(kStagedCodes / staged_code_bytes()), 1, count_);
    const auto staged = static_cast<size_t>(step);
    NIBBLE_RETURN_IF_ERROR(context_.scratch.stage(staged * staged_code_bytes(),
                                                  staged * staged_number_bytes(), context_.stream));
  }
  for (int64_t first = 0; first < count_; first += step) {
    const int64_t count = std::min(step, count_ - first);
    NIBBLE_RETURN_IF_ERROR(load_staged(
        first, count,
        parts.subspan(static_cast<size_t>(first) * of_each, static_cast<size_t>(count) * of_each)));
  }
  return {};
}

Status PackedMatrices::load_staged(int64_t first, int64_t count, std::span<const QuantView> parts) {
  const size_t of_each = parts.size() / static_cast<size_t>(count);
  const bool packs = !kernel_->packs_nothing();
  const ZeroPoints zero_points = problem_.weight.zero_points;
  WeightStream codes(context_.uploader.copy());
  WeightStream numbers(context_.uploader.copy());
  for (size_t begin = 0; begin < parts.size(); begin += of_each) {
    const auto matrix = parts.subspan(begin, of_each);
    codes.align(kStagedAlignment);
    numbers.align(kStagedAlignment);
    for (const QuantView& part : matrix) {
      codes.add(part, WeightField::kCodes);
      numbers.add(part, WeightField::kScales);
    }
    for (const QuantView& part : zero_points == ZeroPoints::kNone ? matrix.first(0) : matrix) {
      numbers.add(part, behind_scales(zero_points));
    }
  }
  const GemmScratch& scratch = context_.scratch;
  NIBBLE_RETURN_IF_ERROR(send(codes, packs ? scratch.staged_codes() : place_of(first)));
  if (!packs) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(send(numbers, scratch.staged_scales()));
  for (int64_t i = 0; i < count; ++i) {
    const auto offset = static_cast<size_t>(i);
    NIBBLE_RETURN_IF_ERROR(check(
        kernel_->pack(scratch.staged_codes() + offset * staged_code_bytes(),
                      scratch.staged_scales() + offset * (staged_number_bytes() / sizeof(float)),
                      place_of(first + i), context_.stream),
        kPacking));
  }
  return {};
}

Status PackedMatrices::update(int64_t index, int64_t first_row, const QuantTensor& rows) {
  const QuantView view = view_of(rows);
  QuantView on_device = view;
  on_device.format = device_format(view.format);
  NIBBLE_RETURN_IF_ERROR(check_update(problem_, first_row, on_device));
  NIBBLE_RETURN_IF_ERROR(check_numbers(view));
  const int64_t row_bytes = QuantTensor::code_row_bytes(problem_.weight.code, problem_.k);
  const int64_t groups = problem_.weight.groups(problem_.k);
  const ZeroPoints zero_points = problem_.weight.zero_points;
  const auto send_field = [&](WeightField field, void* to) {
    WeightStream stream(context_.uploader.copy());
    stream.add(view, field);
    return send(stream, to);
  };
  if (kernel_->packs_nothing()) {
    NIBBLE_RETURN_IF_ERROR(
        send_field(WeightField::kCodes, place_of(index) + first_row * row_bytes));
    return check(cudaStreamSynchronize(context_.stream), kPacking);
  }
  GemmScratch& scratch = context_.scratch;
  NIBBLE_RETURN_IF_ERROR(
      scratch.stage(staged_code_bytes(), staged_number_bytes(), context_.stream));
  std::byte* codes = scratch.staged_codes();
  float* scales = scratch.staged_scales();
  if (view.n < problem_.n) {
    NIBBLE_RETURN_IF_ERROR(
        check(kernel_->unpack(at(index), codes, scales, context_.stream), "unpacking weights"));
  }
  NIBBLE_RETURN_IF_ERROR(send_field(WeightField::kCodes, codes + first_row * row_bytes));
  NIBBLE_RETURN_IF_ERROR(send_field(WeightField::kScales, scales + first_row * groups));
  if (zero_points != ZeroPoints::kNone) {
    NIBBLE_RETURN_IF_ERROR(
        send_field(behind_scales(zero_points), scales + (problem_.n + first_row) * groups));
  }
  NIBBLE_RETURN_IF_ERROR(
      check(kernel_->pack(codes, scales, place_of(index), context_.stream), kPacking));
  return check(cudaStreamSynchronize(context_.stream), kPacking);
}

Result<QuantTensor> PackedMatrices::unpack(int64_t index) const {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight,
                          QuantTensor::allocate(problem_.weight, problem_.n, problem_.k));
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer codes,
                          allocate_device(weight.codes.size() + 1, "a matrix being unpacked"));
  NIBBLE_ASSIGN_OR_RETURN(
      DeviceBuffer scales,
      allocate_device(weight.scales.size() + 4 * weight.zeros.size() + weight.minimums.size() + 1,
                      "scales being unpacked"));
  NIBBLE_RETURN_IF_ERROR(
      check(kernel_->unpack(at(index), codes.as<void>(), scales.as<float>(), context_.stream),
            "unpacking weights"));
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(context_.stream), "unpacking weights"));
  const auto copy = [](void* to, const std::byte* from, size_t bytes, const char* what) {
    return bytes == 0 ? Status() : check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), what);
  };
  const auto* numbers = scales.as<std::byte>();
  const auto* behind = numbers + weight.scales.size();
  NIBBLE_RETURN_IF_ERROR(
      copy(weight.codes.data(), codes.as<std::byte>(), weight.codes.size(), "copying weights"));
  NIBBLE_RETURN_IF_ERROR(
      copy(weight.scales.data(), numbers, weight.scales.size(), "copying scales"));
  NIBBLE_RETURN_IF_ERROR(
      copy(weight.minimums.data(), behind, weight.minimums.size(), "copying minimums"));
  std::vector<float> zeros(weight.zeros.size());
  NIBBLE_RETURN_IF_ERROR(
      copy(zeros.data(), behind, zeros.size() * sizeof(float), "copying zero points"));
  std::ranges::transform(zeros, weight.zeros.as<int8_t>().begin(),
                         [](float zero) { return static_cast<int8_t>(zero); });
  return weight;
}

}  // namespace nibble::cuda
