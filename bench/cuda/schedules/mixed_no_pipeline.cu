#include "bench/cuda/schedules/mixed_forms.h"
#include "bench/cuda/schedules/mixed_instance.cuh"

namespace nibble::cuda {

const std::array<MixedTile, 5> kMixedNoPipeline =
    mixed_tiles_of<MixedInt8Codec<kInterleaved, kZeros>, MixedBf16Codec<kInterleaved>, true>(
        MixedForm::kNoPipeline);

}  // namespace nibble::cuda
