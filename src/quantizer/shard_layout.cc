#include "quantizer/shard_layout.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "checkpoint/safetensors.h"

namespace nibble {
namespace {

bool reference_order(const PlannedTensor* a, const PlannedTensor* b) {
  return a->tensor.dtype != b->tensor.dtype ? a->tensor.dtype > b->tensor.dtype
                                            : a->tensor.name < b->tensor.name;
}

Status set_sizes(const std::vector<std::vector<PlannedTensor>*>& outputs) {
  std::unordered_set<std::string_view> names;
  for (std::vector<PlannedTensor>* job : outputs) {
    for (PlannedTensor& output : *job) {
      NIBBLE_ASSIGN_OR_RETURN(output.tensor.bytes,
                              tensor_bytes(output.tensor.dtype, output.tensor.shape));
      if (!names.insert(output.tensor.name).second) {
        return make_error(StatusCode::kInvalidArgument, "tensor {} would be written twice",
                          output.tensor.name);
      }
    }
  }
  return {};
}

void place_tensors(PlannedShard& shard, const std::vector<std::vector<PlannedTensor>*>& outputs) {
  std::vector<PlannedTensor*> tensors;
  for (const size_t job : shard.jobs) {
    for (PlannedTensor& output : *outputs[job]) {
      tensors.push_back(&output);
    }
  }
  std::sort(tensors.begin(), tensors.end(), reference_order);
  shard.data_begin = static_cast<int64_t>(shard_header({tensors.begin(), tensors.end()}).size());
  int64_t at = shard.data_begin;
  for (PlannedTensor* output : tensors) {
    output->offset = at;
    at += output->tensor.bytes;
  }
  shard.file_bytes = at;
}

}  // namespace

Result<std::vector<PlannedShard>> layout_shards(std::vector<std::vector<PlannedTensor>*> outputs,
                                                int64_t shard_bytes) {
  NIBBLE_RETURN_IF_ERROR(set_sizes(outputs));
  std::vector<PlannedShard> shards(1);
  int64_t filled = 0;
  for (size_t job = 0; job < outputs.size(); ++job) {
    const int64_t bytes = std::accumulate(
        outputs[job]->begin(), outputs[job]->end(), int64_t{0},
        [](int64_t sum, const PlannedTensor& output) { return sum + output.tensor.bytes; });
    if (!shards.back().jobs.empty() && filled + bytes > shard_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    filled += bytes;
    shards.back().jobs.push_back(job);
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? std::string("model.safetensors")
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    place_tensors(shards[i], outputs);
  }
  return shards;
}

std::string shard_header(const std::vector<const PlannedTensor*>& tensors) {
  std::vector<const PlannedTensor*> sorted = tensors;
  std::sort(sorted.begin(), sorted.end(), reference_order);
  std::vector<TensorPlan> plans;
  plans.reserve(sorted.size());
  for (const PlannedTensor* tensor : sorted) {
    plans.push_back(tensor->tensor);
  }
  return safetensors_header(plans);
}

std::vector<size_t> shards_of_part(const std::vector<int64_t>& weights, int part, int parts) {
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return weights[a] > weights[b]; });
  std::vector<int64_t> load(static_cast<size_t>(parts));
  std::vector<size_t> mine;
  for (const size_t shard : order) {  // the heaviest first, each to the least loaded part
    const auto lightest = std::min_element(load.begin(), load.end());
    *lightest += weights[shard];
    if (lightest - load.begin() == part - 1) {
      mine.push_back(shard);
    }
  }
  std::sort(mine.begin(), mine.end());
  return mine;
}

}  // namespace nibble
