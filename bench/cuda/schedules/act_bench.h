#pragma once

#include "bench/cuda/schedules/schedule_bench.h"

namespace nibble::cuda {

/// Times products whose INT8 blocks have activations of 4 bits, stored in bytes and two a byte,
/// with each tile that suits, and the kernel that writes such rows, in turns, as bench_schedules()
/// times launches. Prints a table; returns {"act_products": [{"shape", "m", "n", "k",
/// "bf16_percent", "tile", "bytes_us", "nibbles_us", "bytes_over_nibbles"}], "act_rows": [{"m",
/// "k", "bytes_us", "nibbles_us", "bytes_over_nibbles", "int8_us"}]}. A point's last row, of the
/// tile "best", has the least time of each, and int8_us is that of the program's own kernel for
/// INT8 rows.
Result<Json> bench_act_stores(const DeviceInfo& device, const ScheduleBenchOptions& options);

}  // namespace nibble::cuda
