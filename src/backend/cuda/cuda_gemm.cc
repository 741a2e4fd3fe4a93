#include "backend/cuda/cuda_gemm.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/row_kernels.h"
#include "base/check.h"
#include "base/f16.h"

namespace nibble::cuda {
namespace {

// Weights [begin, begin + count) of an F16 or F32 matrix.
void round_to_bf16(const QuantView& part, size_t begin, size_t count, std::byte* out) {
  const auto convert = [&]<typename T>(auto widen) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    const auto round = [&](const std::byte* from, int64_t bytes) {
      for (int64_t at = 0; at < bytes; at += kSize) {
        T value;
        std::memcpy(&value, from + at, sizeof(T));
        const uint16_t rounded = f32_to_bf16(widen(value));
        std::memcpy(out, &rounded, sizeof(rounded));
        out += sizeof(rounded);
      }
    };
    part.for_pieces(static_cast<int64_t>(begin) * kSize, static_cast<int64_t>(count) * kSize,
                    round);
  };
  if (part.format.code == WeightCode::kF16) {
    convert.operator()<uint16_t>(f16_to_f32);
  } else {
    convert.operator()<float>([](float value) { return value; });
  }
}

}  // namespace

WeightFormat CudaGemm::device_format(WeightFormat format) {
  if (format.code == WeightCode::kF16 || format.code == WeightCode::kF32) {
    format.code = WeightCode::kBf16;
  }
  if (format.scale_per == ScalePer::kGroup &&
      (format.scale_dtype == DType::kF32 || format.scale_dtype == DType::kF16)) {
    format.scale_dtype = DType::kBF16;
  }
  if (format.scale_per == ScalePer::kTensor) {  // the same scale for every channel
    format.scale_per = ScalePer::kChannel;
  }
  return format;
}

Result<std::unique_ptr<CudaGemm>> CudaGemm::create(std::span<const QuantView> parts,
                                                   const GemmEntry& entry,
                                                   const GemmProblem& problem,
                                                   int64_t max_m,
                                                   const GemmContext& context) {
  std::unique_ptr<CudaGemm> gemm(new CudaGemm(problem, context, max_m));
  gemm->name_ = entry.name;
  NIBBLE_ASSIGN_OR_RETURN(gemm->kernel_, entry.make(problem, context.device));
  NIBBLE_RETURN_IF_ERROR(
      context.scratch.reserve({max_m, problem.k, row_scales(problem.act, problem.k)},
                              gemm->kernel_->workspace_bytes(max_m)));
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer packed,
                          allocate_device(gemm->kernel_->packed_bytes(), "a weight matrix"));
  gemm->packed_ = std::make_shared<DeviceBuffer>(std::move(packed));
  NIBBLE_RETURN_IF_ERROR(gemm->load(0, parts));
  return gemm;
}

Status CudaGemm::load(int64_t first_row, std::span<const QuantView> parts) {
  constexpr const char* kWhat = "packing weights";
  const int64_t row_bytes = QuantTensor::code_row_bytes(problem_.weight.code, problem_.k);
  const int64_t groups = problem_.weight.groups(problem_.k);
  if (kernel_->packs_nothing()) {
    NIBBLE_RETURN_IF_ERROR(upload_codes(parts, packed_->as<std::byte>() + first_row * row_bytes));
    return check(cudaStreamSynchronize(context_.stream), kWhat);
  }
  const ZeroPoints zero_points = problem_.weight.zero_points;
  const int64_t all_scales = problem_.n * groups * (zero_points == ZeroPoints::kNone ? 1 : 2);
  GemmScratch& scratch = context_.scratch;
  NIBBLE_RETURN_IF_ERROR(scratch.stage(static_cast<size_t>(problem_.n * row_bytes),
                                       static_cast<size_t>(all_scales) * sizeof(float)));
  int64_t rows = 0;
  for (const QuantView& part : parts) {
    rows += part.n;
  }
  if (rows < problem_.n) {
    NIBBLE_RETURN_IF_ERROR(check(kernel_->unpack(packed_->as<void>(), scratch.staged_codes(),
                                                 scratch.staged_scales(), context_.stream),
                                 "unpacking weights"));
  }
  NIBBLE_RETURN_IF_ERROR(upload_codes(parts, scratch.staged_codes() + first_row * row_bytes));
  if (groups > 0) {
    NIBBLE_RETURN_IF_ERROR(upload_numbers(parts, &QuantView::read_scales,
                                          scratch.staged_scales() + first_row * groups));
  }
  float* behind = scratch.staged_scales() + (problem_.n + first_row) * groups;
  if (zero_points == ZeroPoints::kPerScale) {
    NIBBLE_RETURN_IF_ERROR(upload_zeros(parts, behind));
  } else if (zero_points == ZeroPoints::kMinimum) {
    NIBBLE_RETURN_IF_ERROR(upload_numbers(parts, &QuantView::read_minimums, behind));
  }
  NIBBLE_RETURN_IF_ERROR(check(kernel_->pack(scratch.staged_codes(), scratch.staged_scales(),
                                             packed_->as<void>(), context_.stream),
                               kWhat));
  return check(cudaStreamSynchronize(context_.stream), kWhat);
}

Status CudaGemm::upload_codes(std::span<const QuantView> parts, std::byte* to) {
  for (const QuantView& part : parts) {
    const int64_t row_bytes = QuantTensor::code_row_bytes(problem_.weight.code, problem_.k);
    const auto bytes = static_cast<size_t>(part.n * row_bytes);
    if (part.format.code == problem_.weight.code) {
      const auto copy = [&part](size_t begin, size_t size, std::byte* out) {
        part.copy_codes(static_cast<int64_t>(begin), static_cast<int64_t>(size), out);
      };
      NIBBLE_RETURN_IF_ERROR(context_.uploader.upload(bytes, copy, to));
    } else {
      const auto round = [&part](size_t begin, size_t size, std::byte* out) {
        round_to_bf16(part, begin / 2, size / 2, out);
      };
      NIBBLE_RETURN_IF_ERROR(context_.uploader.upload(bytes, round, to));
    }
    to += bytes;
  }
  return {};
}

Status CudaGemm::upload_numbers(std::span<const QuantView> parts, ReadNumbers read, float* to) {
  const int64_t groups = problem_.weight.groups(problem_.k);
  for (const QuantView& part : parts) {
    const auto count = static_cast<size_t>(part.n * groups);
    const auto fill = [&part, read](size_t begin, size_t size, std::byte* out) {
      (part.*read)(static_cast<int64_t>(begin / sizeof(float)),
                   {reinterpret_cast<float*>(out), size / sizeof(float)});
    };
    NIBBLE_RETURN_IF_ERROR(context_.uploader.upload(count * sizeof(float), fill, to));
    to += count;
  }
  return {};
}

Status CudaGemm::upload_zeros(std::span<const QuantView> parts, float* to) {
  for (const QuantView& part : parts) {
    const auto count = static_cast<size_t>(part.n * problem_.weight.groups(problem_.k));
    const auto widen = [&part](size_t begin, size_t size, std::byte* out) {
      const int8_t* from = part.zeros + begin / sizeof(float);
      std::transform(from, from + size / sizeof(float), reinterpret_cast<float*>(out),
                     [](int8_t zero) { return static_cast<float>(zero); });
    };
    NIBBLE_RETURN_IF_ERROR(context_.uploader.upload(count * sizeof(float), widen, to));
    to += count;
  }
  return {};
}

bool CudaGemm::takes_rows_as_given(const GemmArgs& args) const {
  return args.input.kind == GemmInput::Kind::kPlain && row_scales(problem_.act, problem_.k) == 0;
}

bool CudaGemm::reads_rows_of(const PreparedGemm& other, int64_t /*m*/) const {
  const auto* rows = dynamic_cast<const CudaGemm*>(&other);
  return rows != nullptr && problem_.act == rows->problem_.act && problem_.k == rows->problem_.k;
}

Status CudaGemm::launch_rounding(const GemmArgs& args) const {
  CHECK_LE(args.m, max_m_);
  const LaunchContext launch{context_.stream};
  const GemmScratch& scratch = context_.scratch;
  const QuantizedRows out{problem_.act, scratch.values(), scratch.scales()};
  if (is_norm(args.input.kind)) {
    CHECK_EQ(args.x_stride, problem_.k);
    return check(
        norm_quantize(
            {.x = args.x.f32(), .norm = args.input, .rows = args.m, .n = problem_.k, .out = out},
            launch),
        "norm");
  }
  CHECK(args.x.type == DType::kBF16);
  if (args.input.kind != GemmInput::Kind::kPlain) {
    return check(activation_quantize({.x = args.x.data,
                                      .kind = args.input.kind,
                                      .stride = args.x_stride,
                                      .rows = args.m,
                                      .n = problem_.k,
                                      .out = out,
                                      .limit = args.input.limit},
                                     launch),
                 "activation");
  }
  if (takes_rows_as_given(args)) {
    CHECK_EQ(args.x_stride, problem_.k);
    return {};
  }
  return check(
      quantize_rows(
          {.x = args.x.data, .stride = args.x_stride, .rows = args.m, .n = problem_.k, .out = out},
          launch),
      "rounding activations");
}

void CudaGemm::round_rows(const GemmArgs& args) { must(launch_rounding(args)); }

void CudaGemm::multiply(const GemmArgs& args) { must(launch_product(args)); }

Status CudaGemm::launch(const GemmArgs& args) {
  NIBBLE_RETURN_IF_ERROR(launch_rounding(args));
  return launch_product(args);
}

Status CudaGemm::launch_product(const GemmArgs& args) const {
  CHECK_LE(args.m, max_m_);
  const GemmScratch& scratch = context_.scratch;
  const bool add = args.output == GemmOutput::kAdd;
  const bool f32 = args.y.type == DType::kF32;
  CHECK(f32 || !add);
  return check(kernel_->run({.x = takes_rows_as_given(args) ? args.x.data : scratch.values(),
                             .x_scales = scratch.scales(),
                             .packed = packed_->as<void>(),
                             .bias = args.bias,
                             .y = args.y.data,
                             .y_stride = args.y_stride,
                             .m = args.m,
                             .result = add   ? GemmResult::kAddF32
                                       : f32 ? GemmResult::kF32
                                             : GemmResult::kBf16,
                             .workspace = scratch.workspace()},
                            {context_.stream}),
               name_);
}

std::vector<int64_t> CudaGemm::row_counts(int64_t most) const {
  std::vector<int64_t> counts;
  std::set<int> seen;
  // Where there are many rows, choices lie further apart.
  for (int64_t m = 1; m <= std::min(most, max_m_); m += std::max<int64_t>(1, m / 32)) {
    if (seen.insert(kernel_->choose(m)).second) {
      counts.push_back(m);
    }
  }
  return counts;
}

Result<QuantTensor> CudaGemm::unpack() const {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight,
                          QuantTensor::allocate(problem_.weight, problem_.n, problem_.k));
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer codes,
                          allocate_device(weight.codes.size() + 1, "a matrix being unpacked"));
  NIBBLE_ASSIGN_OR_RETURN(
      DeviceBuffer scales,
      allocate_device(weight.scales.size() + 4 * weight.zeros.size() + weight.minimums.size() + 1,
                      "scales being unpacked"));
  NIBBLE_RETURN_IF_ERROR(check(
      kernel_->unpack(packed_->as<void>(), codes.as<void>(), scales.as<float>(), context_.stream),
      "unpacking weights"));
  NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(context_.stream), "unpacking weights"));
  NIBBLE_RETURN_IF_ERROR(check(cudaMemcpy(weight.codes.data(), codes.as<void>(),
                                          weight.codes.size(), cudaMemcpyDeviceToHost),
                               "copying weights"));
  NIBBLE_RETURN_IF_ERROR(check(cudaMemcpy(weight.scales.data(), scales.as<void>(),
                                          weight.scales.size(), cudaMemcpyDeviceToHost),
                               "copying scales"));
  if (weight.minimums.size() > 0) {
    NIBBLE_RETURN_IF_ERROR(
        check(cudaMemcpy(weight.minimums.data(), scales.as<std::byte>() + weight.scales.size(),
                         weight.minimums.size(), cudaMemcpyDeviceToHost),
              "copying minimums"));
  }
  if (weight.zeros.size() > 0) {
    std::vector<float> zeros(weight.zeros.size());
    NIBBLE_RETURN_IF_ERROR(check(cudaMemcpy(zeros.data(), scales.as<float>() + zeros.size(),
                                            zeros.size() * sizeof(float), cudaMemcpyDeviceToHost),
                                 "copying zero points"));
    std::ranges::transform(zeros, weight.zeros.as<int8_t>().begin(),
                           [](float zero) { return static_cast<int8_t>(zero); });
  }
  return weight;
}

Status CudaGemm::update(int64_t first_row, const QuantTensor& rows) {
  const QuantView view = view_of(rows);
  QuantView on_device = view;
  on_device.format = device_format(view.format);
  NIBBLE_RETURN_IF_ERROR(check_update(problem_, first_row, on_device));
  return load(first_row, {&view, 1});
}

}  // namespace nibble::cuda
