#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "calibration/channel_sizes.h"
#include "calibration/model_transform.h"

namespace nibble {

struct OrderFinding {
  std::string model;  // folder
  const std::vector<std::vector<int32_t>>& windows;
  OrderKey key = OrderKey::kMeanSquare;
  int64_t parts = 1;   // equal ones, that what down multiplies stays in (split_parts())
  std::string beside;  // where a file for hidden states is made, which has no name
  int threads = 1;
  const std::atomic<bool>* stop = nullptr;
};

/// Runs the model layer by layer over the windows, and orders the channels of its residual stream
/// (by the sum over the inputs of q, k and v and of gate and up, the mean of each input counting
/// alike), the values of each head, and what down multiplies, by their size. Inputs that are turned
/// keep their order, as do experts without rows.
/// Errors: those of load_model(); kCancelled, kIo.
Result<ChannelOrders> find_orders(const OrderFinding& finding);

}  // namespace nibble
