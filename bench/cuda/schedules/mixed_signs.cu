#include "bench/cuda/schedules/mixed_forms.h"
#include "bench/cuda/schedules/mixed_instance.cuh"

namespace nibble::cuda {

const std::array<MixedTile, 5> kMixedSignExtension =
    mixed_tiles_of<MixedInt8Codec<kInterleaved, Widening::kSigns>,
                   MixedBf16Codec<kInterleaved>,
                   false>(MixedForm::kSignExtension);

}  // namespace nibble::cuda
