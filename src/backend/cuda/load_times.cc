#include "backend/cuda/load_times.h"

#include <fmt/format.h>

namespace nibble::cuda {

std::string LoadTimes::text(const Uploader::Spent& sent) const {
  return fmt::format(
      "{:.2f} GB sent to the GPU: {:.2f} s copying to page-locked memory, {:.2f} s waiting until "
      "that was sent, {:.2f} s for GPU memory and starting kernels, {:.2f} s until the last of "
      "each matrix or layer was packed",
      static_cast<double>(sent.bytes) / 1e9, sent.filling.count(), sent.waiting.count(),
      preparing_.count(), waiting_.count());
}

}  // namespace nibble::cuda
