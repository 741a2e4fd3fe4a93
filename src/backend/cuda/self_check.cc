#include "backend/cuda/self_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "backend/cuda/row_kernels.h"
#include "backend/cuda/self_check_data.h"
#include "base/f16.h"
#include "base/log.h"
#include "ops/silu_form.h"
#include "quant/codec.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kEdgeRows = 24;    // of the matrix at each end and in its middle
constexpr int64_t kRandomRows = 61;  // repeated: no tile has as many
constexpr uint32_t kSeed = 20;

/// Rows of the stacked matrix that are compared.
std::vector<int64_t> sampled_rows(int64_t n) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < n; ++row) {
    const int64_t middle = row - (n - kEdgeRows) / 2;
    if (row < kEdgeRows || row >= n - kEdgeRows || (middle >= 0 && middle < kEdgeRows)) {
      rows.push_back(row);
    }
  }
  return rows;
}

/// The part that has row `row` of the stacked matrix, which becomes the row within it.
const QuantView& part_of(std::span<const QuantView> parts, int64_t& row) {
  for (const QuantView& part : parts) {
    if (row < part.n) {
      return part;
    }
    row -= part.n;
  }
  CHECK_MSG(false, "no such row");
  return parts.front();
}

Result<QuantTensor> copy_rows(std::span<const QuantView> parts, std::span<const int64_t> rows) {
  const QuantView& first = parts.front();
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor out,
                          QuantTensor::allocate(first.format, std::ssize(rows), first.k));
  const int64_t bytes = first.row_bytes();
  const int64_t groups = first.format.groups(first.k);
  for (size_t i = 0; i < rows.size(); ++i) {
    int64_t row = rows[i];
    const QuantView& part = part_of(parts, row);
    part.copy_codes(row * bytes, bytes, out.codes.data() + static_cast<int64_t>(i) * bytes);
    const size_t to = i * static_cast<size_t>(groups);
    part.read_scales(row * groups, out.scales.as<float>().subspan(to, static_cast<size_t>(groups)));
    if (part.zeros != nullptr) {
      std::copy_n(part.zeros + row * groups, groups, out.zeros.as<int8_t>().data() + to);
    }
    if (part.minimums != nullptr) {
      part.read_minimums(row * groups,
                         out.minimums.as<float>().subspan(to, static_cast<size_t>(groups)));
    }
  }
  return out;
}

/// `weight` rounded to the format in which the GPU keeps it.
Result<QuantTensor> as_on_device(QuantTensor weight) {
  const WeightFormat format = device_format(weight.format);
  if (format.scale_dtype == DType::kBF16) {
    for (const std::span<float> numbers :
         {weight.scales.as<float>(), weight.minimums.as<float>()}) {
      std::ranges::transform(numbers, numbers.begin(),
                             [](float number) { return bf16_to_f32(f32_to_bf16(number)); });
    }
  }
  if (format.code == weight.format.code) {
    weight.format = format;
    return weight;
  }
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor out, QuantTensor::allocate(format, weight.n, weight.k));
  std::vector<float> values(static_cast<size_t>(weight.k));
  for (int64_t row = 0; row < weight.n; ++row) {
    decode_row(weight, row, values.data());
    std::ranges::transform(values, out.codes.as<uint16_t>().begin() + row * weight.k, f32_to_bf16);
  }
  return out;
}

/// "down_proj" of "model.safetensors: tensor model.layers.3.mlp.down_proj.weight".
std::string layer_kind(std::string_view name) {
  const size_t end = name.rfind('.');
  if (end == std::string_view::npos || end == 0) {
    return std::string(name);
  }
  const size_t begin = name.rfind('.', end - 1);
  return std::string(name.substr(begin == std::string_view::npos ? 0 : begin + 1, end - begin - 1));
}

/// x / (1 + e^(-alpha x)) as `form` says.
double silu(double x, const SiluForm& form, double alpha = 1.0) {
  const auto raised = static_cast<float>(x / (1.0 + std::exp(-alpha * x)) * form.factor);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(raised) & form.bits);
}

double clamped_swiglu(float gate, float up, float limit, const SiluForm& form) {
  return silu(std::min(gate, limit), form, kSwigluAlpha) * (std::clamp(up, -limit, limit) + 1.0);
}

/// Value of element `at` of what a row kernel wrote.
double value_of(const QuantizedRows& out, std::span<const std::byte> values, size_t at) {
  if (out.format == ActFormat::kBf16) {
    uint16_t bits = 0;
    std::memcpy(&bits, values.data() + 2 * at, 2);
    return bf16_to_f32(bits);
  }
  const auto code = static_cast<uint8_t>(values[at]);
  return out.format == ActFormat::kInt8Token ? static_cast<int8_t>(code) : decode_e4m3(code);
}

/// How far an element may be from the number that it rounds: half a step, and a little for the
/// arithmetic in F32 before.
double rounding_of(ActFormat act, double want, double scale) {
  switch (act) {
    case ActFormat::kInt8Token:
      return 0.51 * scale;
    case ActFormat::kFp8Token:
    case ActFormat::kFp8Group:
      return std::fabs(want) * 0.0626 + scale * 0x1p-9;
    default:
      return std::fabs(want) * 0x1p-8 + 4e-6;
  }
}

/// `rows` rows of x [kRandomRows, k], again and again, on the GPU.
Result<DeviceBuffer> repeated_rows(const std::vector<uint16_t>& x, int64_t rows) {
  const size_t bytes = x.size() / kRandomRows * static_cast<size_t>(rows) * sizeof(uint16_t);
  NIBBLE_ASSIGN_OR_RETURN(DeviceBuffer out, allocate_device(bytes, "the self-test"));
  for (size_t at = 0; at < bytes; at += x.size() * sizeof(uint16_t)) {
    NIBBLE_RETURN_IF_ERROR(copy_to_device(out.as<std::byte>() + at, x.data(),
                                          std::min(bytes - at, x.size() * sizeof(uint16_t))));
  }
  return out;
}

/// The last row of y [m, n] beside `want`, its outputs at `rows`.
Result<Difference> last_row(const DeviceBuffer& y,
                            int64_t m,
                            int64_t n,
                            std::span<const int64_t> rows,
                            std::span<const float> want) {
  std::vector<float> got(rows.size());
  for (size_t first = 0, end = 0; first < rows.size(); first = end) {  // neighbours at once
    for (end = first + 1; end < rows.size() && rows[end] == rows[end - 1] + 1; ++end) {
    }
    NIBBLE_RETURN_IF_ERROR(copy_back(y, static_cast<size_t>((m - 1) * n + rows[first]),
                                     std::span(got).subspan(first, end - first)));
  }
  Difference difference;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (std::isfinite(want[i])) {  // what the file itself says to be none is no kernel's fault
      difference.add(got[i], want[i], m - 1, rows[i]);
    }
  }
  return difference;
}

}  // namespace

double Difference::relative() const { return std::sqrt(squares / total); }

double product_tolerance(const WeightFormat& weight, ActFormat act) {
  switch (act) {
    case ActFormat::kInt8Token:  // sums are exact; two scales are applied in F32
    case ActFormat::kIntBlocks:
      return 1e-6;
    case ActFormat::kBf16Blocks:  // BF16, which the reference has in fixed point (fixed_unit())
      return 3e-4;
    case ActFormat::kFp8Token:  // the tensor cores keep about 14 bits of a running sum
    case ActFormat::kFp8Group:
      return 1e-2;
    case ActFormat::kFloat:
    case ActFormat::kBf16:
      break;
  }
  // Scaled weights are rounded by up to 2^-8, 2^-8 / sqrt(3) on average; or F32 sums alone.
  return weight.quantized() ? 3e-3 : 1e-4;
}

Status SelfCheck::check_product(CudaGemm& gemm,
                                std::span<const QuantView> parts,
                                const ActSpec& act,
                                int64_t most_rows) {
  const auto start = std::chrono::steady_clock::now();
  const QuantView& first = parts.front();
  const int64_t k = first.k;
  int64_t n = 0;
  for (const QuantView& part : parts) {
    n += part.n;
  }
  const auto key = std::tuple{std::string(gemm.kernel_name()) + " " + layer_kind(first.name), n, k,
                              first.format.group_size, static_cast<int>(act.format)};
  if (!products_.insert(key).second) {
    return {};
  }
  const std::vector<int64_t> rows = sampled_rows(n);
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, copy_rows(parts, rows));
  NIBBLE_ASSIGN_OR_RETURN(weight, as_on_device(std::move(weight)));
  // The rows of a product are the last ones of x, so that one of them is always the same.
  const std::vector<int64_t> row_counts = gemm.row_counts(most_rows);  // ascending
  const int64_t most = row_counts.back();
  const std::vector<uint16_t> x = random_bf16(static_cast<size_t>(kRandomRows * k), kSeed);
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_x, repeated_rows(x, most));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer y,
                          poisoned_device(static_cast<size_t>(most * n) * sizeof(float)));
  std::vector<float> input(static_cast<size_t>(k)), want(rows.size());
  const auto last = x.begin() + (most - 1) % kRandomRows * k;
  std::transform(last, last + k, input.begin(), bf16_to_f32);
  reference_gemm(
      weight, act,
      {.x = input.data(), .x_stride = k, .m = 1, .y = want.data(), .y_stride = weight.n});
  const double tolerance = product_tolerance(weight.format, act.format);
  for (const int64_t m : row_counts) {
    Status ran =
        gemm.launch({.x = Activations(device_x.as<uint16_t>() + (most - m) * k, DType::kBF16),
                     .x_stride = k,
                     .m = m,
                     .y = y.as<float>(),
                     .y_stride = n});
    if (ran.ok()) {  // the product's own stream need not be this one
      ran = check(cudaDeviceSynchronize(), gemm.kernel_name());
    }
    if (!ran.ok()) {
      return make_error(ran.code(),
                        "self-test: with {} rows of activations, kernel {}; serve with --device "
                        "cpu, and report it",
                        m, ran.message());
    }
    NIBBLE_ASSIGN_OR_RETURN(const Difference difference, last_row(y, m, n, rows, want));
    if (!difference.within(tolerance)) {
      int64_t output = difference.column;
      const QuantView& part = part_of(parts, output);
      return make_error(
          StatusCode::kUnavailable,
          "self-test: kernel {} computes {} wrongly on this GPU: with {} rows of activations its "
          "results differ from the reference by {:.2g} of their size ({:.2g} is allowed), most at "
          "output {}: {:.6g} instead of {:.6g}; serve with --device cpu, and report it",
          gemm.kernel_name(), part.name, m, difference.relative(), tolerance, output,
          difference.got, difference.want);
    }
  }
  finish(std::get<0>(key), start);
  if (!rows_.emplace(act.format, k).second) {
    return {};
  }
  const auto rows_start = std::chrono::steady_clock::now();
  NIBBLE_RETURN_IF_ERROR(in_blocks(act.format) ? check_block_rows(act, first.format, k)
                                               : check_rows(act.format, k));
  add_time("rows in front of products", rows_start);
  return {};
}

void SelfCheck::finish(std::string_view what, std::chrono::steady_clock::time_point start) {
  ++checks_;
  add_time(what, start);
}

void SelfCheck::add_time(std::string_view what, std::chrono::steady_clock::time_point start) {
  const double spent = milliseconds_since(start);
  NIBBLE_LOG(kDebug, "self-test: {} in {:.1f} ms", what, spent);
  milliseconds_ += spent;
}

Status SelfCheck::check_rows(ActFormat act, int64_t n) {
  constexpr int64_t kRows = 3;
  constexpr float kEps = 1e-5F;
  const auto width = static_cast<size_t>(n);
  const std::vector<uint16_t> gate_up = random_bf16(2 * kRows * width, kSeed + 1);
  std::vector<float> x(kRows * width), weight(width);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = bf16_to_f32(gate_up[i]);
  }
  for (size_t i = 0; i < width; ++i) {
    weight[i] = bf16_to_f32(gate_up[x.size() + i]);
  }
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_gate_up, device_copy(gate_up));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_x, device_copy(x));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer device_weight, device_copy(weight));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer values, poisoned_device(x.size() * 2));
  const auto groups = static_cast<size_t>(row_scales(act, n));  // 0: without scales
  NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer scales,
                          poisoned_device(kRows * std::max<size_t>(1, groups) * sizeof(float)));
  const QuantizedRows out{act, values.as<void>(), scales.as<float>()};
  const auto group_size = act == ActFormat::kFp8Group ? static_cast<size_t>(kFp8GroupSize) : width;
  const auto compare = [&](std::string_view kernel, const auto& reference) -> Status {
    NIBBLE_RETURN_IF_ERROR(check(cudaStreamSynchronize(stream_), kernel));
    std::vector<std::byte> bytes(x.size() * (groups > 0 ? 1 : 2));
    std::vector<float> steps(kRows * std::max<size_t>(1, groups), 1.0F);
    NIBBLE_RETURN_IF_ERROR(copy_back(values, 0, std::span(bytes)));
    if (groups > 0) {
      NIBBLE_RETURN_IF_ERROR(copy_back(scales, 0, std::span(steps)));
    }
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t row = i / width;
      const double want = reference(row, i % width);
      const double scale = steps[row * std::max<size_t>(1, groups) + i % width / group_size];
      const double got = value_of(out, bytes, i) * scale;
      if (!(std::fabs(got - want) <= rounding_of(act, want, scale))) {
        return make_error(
            StatusCode::kUnavailable,
            "self-test: kernel {} is wrong on this GPU: of rows of {}, element {} is {:.6g} "
            "instead of {:.6g}; serve with --device cpu, and report it",
            kernel, n, i % width, got, want);
      }
    }
    ++checks_;
    return {};
  };
  double means[kRows] = {};
  double squares[kRows] = {};
  for (size_t i = 0; i < x.size(); ++i) {
    means[i / width] += x[i] / static_cast<double>(n);
    squares[i / width] += static_cast<double>(x[i]) * x[i] / static_cast<double>(n);
  }
  using enum GemmInput::Kind;
  for (const GemmInput::Kind kind : {kRmsNorm, kLayerNorm}) {
    const auto* weights = device_weight.as<float>();  // biases, too
    NIBBLE_RETURN_IF_ERROR(check(norm_quantize({.x = device_x.as<float>(),
                                                .norm = {kind, weights, kEps, weights},
                                                .rows = kRows,
                                                .n = n,
                                                .out = out},
                                               {stream_}),
                                 "norm_quantize"));
    NIBBLE_RETURN_IF_ERROR(compare("norm_quantize", [&](size_t row, size_t column) {
      const bool layer = kind == kLayerNorm;
      const double mean = layer ? means[row] : 0.0;
      const double norm = std::sqrt(squares[row] - mean * mean + kEps);
      return (x[row * width + column] - mean) / norm * weight[column] +
             (layer ? weight[column] : 0.0F);
    }));
  }
  const SiluForm form = is_integer(act) ? kSiluOfInt8 : SiluForm{};
  constexpr float kLimit = 0.75F;  // of gates and ups about as large
  for (const GemmInput::Kind kind : kActivations) {
    NIBBLE_RETURN_IF_ERROR(check(activation_quantize({.x = device_gate_up.as<void>(),
                                                      .kind = kind,
                                                      .rows = kRows,
                                                      .n = n,
                                                      .out = out,
                                                      .limit = kLimit},
                                                     {stream_}),
                                 "activation_quantize"));
    NIBBLE_RETURN_IF_ERROR(compare("activation_quantize", [&](size_t row, size_t column) -> double {
      const uint16_t* given = gate_up.data() + row * static_cast<size_t>(input_width(kind, n));
      const float first = bf16_to_f32(given[column]);
      if (kind == kSiluMul) {
        return silu(first, form) * bf16_to_f32(given[width + column]);
      }
      if (kind == GemmInput::Kind::kClampedSwiglu) {
        const SiluForm own = is_integer(act) ? kSwigluOfInt8 : SiluForm{};
        return clamped_swiglu(first, bf16_to_f32(given[width + column]), kLimit, own);
      }
      return exact_activation(kind, first, 1.0);
    }));
  }
  return {};
}

}  // namespace nibble::cuda
