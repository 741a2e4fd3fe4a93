#pragma once

#include <cstdint>

#include "backend/cuda/attention.h"
#include "backend/cuda/launch.h"

namespace nibble::cuda {

/// How a step's attention becomes a line of tiles for plan_line(). A sequence of at most line_rows
/// rows in the step has, for each KV head, an item for every `columns` of its queries (a row has
/// `ratio` of them), and each item all of its tiles; other sequences become blocks of rows.
struct LineForm {
  int32_t kv_heads = 1;
  int32_t ratio = 1;      // queries of a row for each KV head
  int32_t columns = 1;    // queries that share a pass over the cache
  int32_t line_rows = 1;  // rows of a sequence on the line, at most
  int32_t window = 0;     // with line_rows 1 alone
  int32_t tile_tokens = 1;
  int32_t blocks = 0;       // that share the line, at most
  int32_t least_tiles = 1;  // of a share, before more blocks take part
};

/// Makes the plan of a step (attention/plan.cuh), on the device.
cudaError_t plan_line(const LineForm& form,
                      const StepMetadata& step,
                      void* plan,
                      const LaunchContext& context);

}  // namespace nibble::cuda
