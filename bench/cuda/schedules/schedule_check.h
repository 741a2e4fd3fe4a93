#pragma once

#include "backend/cuda/device_info.h"
#include "base/status.h"

namespace nibble::cuda {

/// Compares every tile, form and schedule of the kernel with double precision, and those of one
/// product with each other bit for bit, over shapes that fill no tile and over maps of one and of
/// two precisions; INT8 blocks have 8 bits, then 4, stored in both ways. Then check_act_rows().
/// Prints a line for each product. Fails at the first that is wrong.
Status check_schedules(const DeviceInfo& device);

}  // namespace nibble::cuda
