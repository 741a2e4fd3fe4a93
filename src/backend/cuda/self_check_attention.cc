#include <cmath>
#include <vector>

#include "backend/cuda/self_check.h"
#include "backend/cuda/self_check_data.h"
#include "base/f16.h"
#include "ops/attention.h"
#include "quant/kv_formats.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kLastPage = 36;  // tokens of the sequence in its second page
constexpr int32_t kDecoded = 2;    // its last tokens: by the kernels for any length, and for short
constexpr int32_t kCompared = 4;   // these and as many of the prefill
constexpr int32_t kPages[] = {2, 0};
constexpr int32_t kPageCount = 3;
constexpr double kTheta = 10000.0;
constexpr uint32_t kSeed = 21;
constexpr float kStep = 0.45F;  // of int4_static, for numbers like those of random_bf16()

/// The sequence, its memory on the GPU, and what of it is one step's.
class AttentionCheck final {
 public:
  AttentionCheck(const AttentionShape& shape, cudaStream_t stream)
      : shape_(shape), stream_(stream), tokens_(shape.kv.page_size + kLastPage) {
    stride_ = static_cast<int64_t>(shape.heads + 2 * shape.kv.kv_heads) * shape.kv.head_dim;
    qkv_ = random_bf16(static_cast<size_t>(tokens_ * stride_), kSeed);
    for (int32_t i = 0; i < shape.kv.head_dim / 2; ++i) {
      inv_freq_.push_back(static_cast<float>(std::pow(kTheta, -2.0 * i / shape.kv.head_dim)));
    }
  }

  Result<Difference> run() {
    const auto width = static_cast<size_t>(shape_.heads) * static_cast<size_t>(shape_.kv.head_dim);
    NIBBLE_ASSIGN_OR_RETURN(device_qkv_, device_copy(qkv_));
    NIBBLE_ASSIGN_OR_RETURN(device_inv_freq_, device_copy(inv_freq_));
    NIBBLE_ASSIGN_OR_RETURN(
        steps_, device_copy(std::vector<float>(
                    static_cast<size_t>(shape_.kv.kv_heads) * shape_.kv.head_dim, kStep)));
    basis_ = basis_of(shape_.kv.code);
    if (kv_format(shape_.kv.code).per == KvParameters::kPerChannel) {
      basis_.key_step = basis_.value_step = steps_.as<float>();
    }
    NIBBLE_ASSIGN_OR_RETURN(out_, poisoned_device(static_cast<size_t>(tokens_) * width * 2));
    NIBBLE_ASSIGN_OR_RETURN(
        pages_,
        allocate_zeroed(static_cast<size_t>(page_bytes(shape_.kv) * kPageCount), "the self-test"));
    const auto kept = static_cast<size_t>(kv_has_residual(shape_.kv.code) ? kPageCount : 0);
    NIBBLE_ASSIGN_OR_RETURN(residual_,
                            allocate_zeroed(kept * static_cast<size_t>(shape_.kv.page_size) *
                                                    static_cast<size_t>(shape_.kv.kv_heads) *
                                                    static_cast<size_t>(shape_.kv.head_dim) * 2 +
                                                1,
                                            "the self-test"));
    NIBBLE_ASSIGN_OR_RETURN(workspace_,
                            allocate_zeroed(attention_workspace_bytes(shape_) + 1, "attention"));
    NIBBLE_RETURN_IF_ERROR(step(0, tokens_ - kDecoded, INT32_MAX));
    NIBBLE_RETURN_IF_ERROR(step(tokens_ - 2, 1, INT32_MAX));
    NIBBLE_RETURN_IF_ERROR(step(tokens_ - 1, 1, kShortAttention));
    const std::vector<float> want = reference();
    std::vector<uint16_t> got(kCompared * width);
    NIBBLE_RETURN_IF_ERROR(
        copy_back(out_, static_cast<size_t>(tokens_ - kCompared) * width, std::span(got)));
    Difference difference;
    for (size_t i = 0; i < got.size(); ++i) {
      difference.add(bf16_to_f32(got[i]), want[i], static_cast<int64_t>(i / width),
                     static_cast<int64_t>(i % width));
    }
    return difference;
  }

 private:
  /// Appends `rows` tokens from `first` on and attends for them. Decode takes its kernels by
  /// `longest`.
  Status step(int32_t first, int32_t rows, int32_t longest) {
    std::vector<int32_t> numbers = {0, rows, first + rows, kPages[0], kPages[1]};
    for (int32_t row = 0; row < rows; ++row) {
      numbers.push_back(first + row);
    }
    numbers.resize(numbers.size() + static_cast<size_t>(rows), 0);  // all of sequence 0
    NIBBLE_ASSIGN_OR_RETURN(const DeviceBuffer memory, device_copy(numbers));
    const auto* at = memory.as<int32_t>();
    const StepMetadata metadata{.q_begin = at,
                                .kv_len = at + 2,
                                .page_table = at + 3,
                                .page_table_stride = 2,
                                .row_position = at + 5,
                                .row_sequence = at + 5 + rows,
                                .sequences = 1,
                                .rows = rows,
                                .longest = longest};
    NIBBLE_ASSIGN_OR_RETURN(
        const DeviceBuffer plan,
        allocate_zeroed(attention_plan_bytes(shape_, 1, rows) + 1, "the plan of attention"));
    uint16_t* qkv = device_qkv_.as<uint16_t>() + first * stride_;
    const int64_t width = static_cast<int64_t>(shape_.heads) * shape_.kv.head_dim;
    const LaunchContext context{.stream = stream_, .overlap = false};
    const ResidualKeys residual{residual_.as<void>(), metadata.page_table};
    const RopeAppendLaunch append{.shape = shape_,
                                  .step = metadata,
                                  .pages = pages_.as<void>(),
                                  .residual = residual,
                                  .qkv = qkv,
                                  .qkv_stride = stride_,
                                  .inv_freq = device_inv_freq_.as<float>(),
                                  .basis = basis_};
    const AttentionLaunch launch{.shape = shape_,
                                 .step = metadata,
                                 .plan = plan.as<void>(),
                                 .pages = pages_.as<void>(),
                                 .residual = residual,
                                 .q = qkv,
                                 .q_stride = stride_,
                                 .out = out_.as<uint16_t>() + first * width,
                                 .out_stride = width,
                                 .basis = append.basis,
                                 .workspace = workspace_.as<void>()};
    if (rows == 1 && !decode_reads_plan(shape_, metadata)) {
      NIBBLE_RETURN_IF_ERROR(check(append_decode_attention(append, launch, context), "attention"));
    } else {
      NIBBLE_RETURN_IF_ERROR(check(rope_append(append, context), "rope"));
      NIBBLE_RETURN_IF_ERROR(
          check(plan_attention(shape_, metadata, plan.as<void>(), context), "attention plan"));
      NIBBLE_RETURN_IF_ERROR(
          check(rows > 1 ? prefill_attention(launch, context) : decode_attention(launch, context),
                "attention"));
    }
    if (launch.basis.changes_results()) {
      NIBBLE_RETURN_IF_ERROR(check(turn_back_heads(launch, context), "attention"));
    }
    return check(cudaStreamSynchronize(stream_), "attention");
  }

  /// [kCompared, heads * head_dim], over keys and values in F32.
  [[nodiscard]] std::vector<float> reference() const {
    std::vector<float> qkv(qkv_.size());
    std::ranges::transform(qkv_, qkv.begin(), bf16_to_f32);
    KvView kv{.code = KvCode::kF32,
              .page_size = shape_.kv.page_size,
              .kv_heads = shape_.kv.kv_heads,
              .head_dim = shape_.kv.head_dim};
    std::vector<std::byte> pages(static_cast<size_t>(kv.page_bytes() * kPageCount));
    kv.pages = pages.data();
    SequenceSpan span{.q_begin = 0, .q_len = tokens_, .kv_len = tokens_, .pages = kPages};
    reference_rope_append({.qkv = qkv.data(),
                           .stride = stride_,
                           .heads = shape_.heads,
                           .inv_freq = inv_freq_.data(),
                           .kv = kv,
                           .sequences = {&span, 1},
                           .form = shape_.form});
    span.q_len = kCompared;
    const int64_t width = static_cast<int64_t>(shape_.heads) * shape_.kv.head_dim;
    std::vector<float> out(static_cast<size_t>(kCompared * width));
    reference_attention({.q = qkv.data() + (tokens_ - kCompared) * stride_,
                         .q_stride = stride_,
                         .out = out.data(),
                         .out_stride = width,
                         .heads = shape_.heads,
                         .scale = static_cast<float>(1.0 / std::sqrt(shape_.kv.head_dim)),
                         .sliding_window = shape_.sliding_window,
                         .kv = kv,
                         .sequences = {&span, 1}});
    return out;
  }

  const AttentionShape shape_;
  cudaStream_t stream_;
  const int32_t tokens_;
  int64_t stride_ = 0;
  std::vector<uint16_t> qkv_;  // [tokens, stride] before rotation
  std::vector<float> inv_freq_;
  KvBasis basis_;
  DeviceBuffer device_qkv_, device_inv_freq_, out_, pages_, residual_, workspace_, steps_;
};

}  // namespace

Status SelfCheck::check_attention(const AttentionShape& shape) {
  const auto start = std::chrono::steady_clock::now();
  const auto key = std::tuple{static_cast<int>(shape.kv.code),
                              shape.sliding_window,
                              shape.kv.page_size,
                              shape.kv.kv_heads,
                              shape.kv.head_dim,
                              shape.heads,
                              static_cast<int>(shape.form)};
  if (!attentions_.insert(key).second) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const Difference difference, AttentionCheck(shape, stream_).run());
  const double tolerance = kv_format(shape.kv.code).tolerance;
  if (!difference.within(tolerance)) {
    return make_error(
        StatusCode::kUnavailable,
        "self-test: attention of {} heads over {} x {} in {}{} is wrong on this GPU ({}): it "
        "differs from the reference by {:.2g} of its size ({:.2g} is allowed), most at output {}: "
        "{:.6g} instead of {:.6g}; choose another --kv-cache-dtype or --device cpu, and report it",
        shape.heads, shape.kv.kv_heads, shape.kv.head_dim, kv_code_name(shape.kv.code),
        shape.sliding_window > 0 ? " with a window" : "",
        difference.row >= kCompared - kDecoded ? "decode" : "prefill", difference.relative(),
        tolerance, difference.column, difference.got, difference.want);
  }
  finish("attention", start);
  return {};
}

}  // namespace nibble::cuda
