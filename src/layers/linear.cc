#include "layers/linear.h"

#include <utility>

#include "base/check.h"

namespace nibble {

Result<Linear> Linear::prepare(std::span<const MappedLinear> parts,
                               std::span<const float> bias,
                               Backend& backend,
                               int64_t max_rows) {
  CHECK(!parts.empty());
  Linear linear;
  linear.k_ = parts.front().weight.k;
  linear.act_ = parts.front().act.format;
  size_t begin = 0;
  while (begin < parts.size()) {  // neighbours with the same forms become one matrix
    const MappedLinear& first = parts[begin];
    std::vector<QuantView> run;
    const int64_t first_column = linear.n_;
    for (; begin < parts.size() && parts[begin].weight.format == first.weight.format &&
           parts[begin].weight.nibbles == first.weight.nibbles && parts[begin].act == first.act;
         ++begin) {
      CHECK_EQ(parts[begin].weight.k, linear.k_);
      linear.n_ += parts[begin].weight.n;
      run.push_back(parts[begin].weight);
    }
    NIBBLE_ASSIGN_OR_RETURN(auto gemm, backend.prepare_gemm(run, first.act, max_rows));
    linear.parts_.push_back(Part{.gemm = std::move(gemm), .first_column = first_column});
  }
  if (!bias.empty()) {
    CHECK_EQ(std::ssize(bias), linear.n_);
    NIBBLE_ASSIGN_OR_RETURN(linear.bias_, backend.upload(bias));
  }
  return linear;
}

Status Linear::prepare_branch() {
  for (const Part& part : parts_) {
    NIBBLE_RETURN_IF_ERROR(part.gemm->prepare_branch());
  }
  return {};
}

int64_t Linear::weight_bytes() const {
  auto bytes = static_cast<int64_t>(bias_.size());
  for (const Part& part : parts_) {
    bytes += part.gemm->weight_bytes();
  }
  return bytes;
}

int64_t Linear::x_stride_of(const GemmArgs& args) const {
  return args.x_stride == 0 ? input_width(args.input.kind, k_) : args.x_stride;
}

void Linear::forward(GemmArgs args) {
  const Activations y = args.y;
  args.x_stride = x_stride_of(args);
  args.y_stride = args.y_stride == 0 ? n_ : args.y_stride;
  const PreparedGemm* rounded = nullptr;  // by whom
  for (const Part& part : parts_) {
    args.y = y.at(part.first_column);
    args.bias = bias_.size() > 0 ? bias_.as<float>() + part.first_column : nullptr;
    if (rounded == nullptr || !part.gemm->reads_rows_of(*rounded, args.m)) {
      part.gemm->round_rows(args);
      rounded = part.gemm.get();
    }
    part.gemm->multiply(args);
  }
}

Linear::Done Linear::forward(const GemmArgs& args, const ForwardContext& context) {
  if (context.observer != nullptr) {
    const InputRows rows{
        .x = args.x, .stride = x_stride_of(args), .width = k_, .input = args.input};
    if (context.observer->observe(context.step, rows) == RowObserver::Then::kSkip) {
      return Done::kNo;
    }
  }
  forward(args);
  return Done::kYes;
}

}  // namespace nibble
