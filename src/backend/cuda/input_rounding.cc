#include "backend/cuda/input_rounding.h"

#include "backend/cuda/cuda_status.h"
#include "base/check.h"

namespace nibble::cuda {

Status round_input(const InputRounding& args, const LaunchContext& launch) {
  if (is_norm(args.input.kind)) {
    CHECK_EQ(args.stride, args.k);
    return check(norm_quantize({.x = args.x.f32(),
                                .norm = args.input,
                                .rows = args.rows,
                                .n = args.k,
                                .out = args.out},
                               launch),
                 "norm");
  }
  CHECK(args.x.type == DType::kBF16);
  if (args.nothing_to_do()) {
    return {};
  }
  if (args.input.kind != GemmInput::Kind::kPlain) {
    return check(activation_quantize({.x = args.x.data,
                                      .kind = args.input.kind,
                                      .stride = args.stride,
                                      .rows = args.rows,
                                      .n = args.k,
                                      .out = args.out,
                                      .limit = args.input.limit,
                                      .turn = args.input.turn},
                                     launch),
                 "activation");
  }
  return check(quantize_rows({.x = args.x.data,
                              .stride = args.stride,
                              .rows = args.rows,
                              .n = args.k,
                              .out = args.out},
                             launch),
               "rounding activations");
}

}  // namespace nibble::cuda
