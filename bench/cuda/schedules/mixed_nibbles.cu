#include "bench/cuda/schedules/mixed_forms.h"
#include "bench/cuda/schedules/mixed_instance.cuh"

namespace nibble::cuda {

const std::array<MixedTile, 5> kMixedNibbles =
    mixed_tiles_of<MixedInt8Codec<kInterleaved, kZeros>,
                   MixedBf16Codec<kInterleaved>,
                   false,
                   ActStore::kNibbles>(MixedForm::kNibbles);

}  // namespace nibble::cuda
