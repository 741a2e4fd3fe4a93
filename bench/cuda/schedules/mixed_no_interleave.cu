#include "bench/cuda/schedules/mixed_forms.h"
#include "bench/cuda/schedules/mixed_instance.cuh"

namespace nibble::cuda {

const std::array<MixedTile, 5> kMixedNoInterleave =
    mixed_tiles_of<MixedInt8Codec<WeightOrder::kPlain, kZeros>,
                   MixedBf16Codec<WeightOrder::kPlain>,
                   false>(MixedForm::kNoInterleave);

}  // namespace nibble::cuda
