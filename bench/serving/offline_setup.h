#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/serving/offline_bench.h"
#include "core/expert_share.h"
#include "tools/model_flags.h"

namespace nibble {

/// What `nibble bench offline` is asked to load.
struct OfflineRequest {
  ModelFlags model;
  std::vector<OfflineShape> shapes;
  int64_t max_num_batched_tokens = 512;
  uint64_t seed = 0;
  std::string dummy_scheme;  // of random weights; empty: the model's own
  int64_t memory = 0;        // bytes that model and cache may take; 0: what there is
  // Of one shape: its batch becomes the largest, up to what it says, whose sequences fit memory.
  enum class Batch : bool { kAsSaid, kThatFits };
  Batch batch = Batch::kAsSaid;
  ExpertShare experts = {};  // that one of several devices has
};

/// A model that is ready to be measured.
struct OfflineSetup {
  ModelConfig config;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<EngineCore> core;
  std::vector<OfflineShape> shapes;
  std::string scheme;
  KvCode kv_code = KvCode::kBf16;
  int64_t weight_bytes = 0;  // Model::weight_bytes()
  int64_t cache_bytes = 0;
  double load_ms = 0;
};

/// The errors of load_model() and OfflineBench::options_for(); kResourceExhausted with the figures
/// where memory does not suffice; kInvalidArgument for a batch that is to fit where nobody says
/// into what.
Result<OfflineSetup> set_up_offline(const OfflineRequest& request);

}  // namespace nibble
