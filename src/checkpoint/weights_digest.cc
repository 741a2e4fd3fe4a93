#include "checkpoint/weights_digest.h"

#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <xxhash.h>

namespace nibble {
namespace {

constexpr size_t kEnd = 1024;

struct FreeState {
  void operator()(XXH64_state_t* state) const { XXH64_freeState(state); }
};

void add_ends(std::span<const std::byte> data, XXH64_state_t* state) {
  const size_t first = data.size() <= 2 * kEnd ? data.size() : kEnd;
  XXH64_update(state, data.data(), first);
  if (first < data.size()) {
    XXH64_update(state, data.data() + data.size() - kEnd, kEnd);
  }
}

}  // namespace

std::string modules_digest(const CheckpointReader& weights, std::span<const std::string> modules) {
  const std::unique_ptr<XXH64_state_t, FreeState> state(XXH64_createState());
  XXH64_reset(state.get(), 0);
  bool any = false;
  for (const std::string& module : modules) {
    for (const std::string_view suffix : {".weight", ".weight_packed", ".qweight"}) {
      if (const TensorInfo* tensor = weights.find(module + std::string(suffix))) {
        XXH64_update(state.get(), tensor->name.data(), tensor->name.size());
        add_ends(tensor->data, state.get());
        any = true;
      }
    }
  }
  return any ? fmt::format("{:016x}", XXH64_digest(state.get())) : std::string();
}

std::string bytes_digest(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH64(bytes.data(), bytes.size(), 0));
}

Result<std::string> weights_digest(const CheckpointReader& weights,
                                   std::span<const std::string> modules) {
  const std::unique_ptr<XXH64_state_t, FreeState> state(XXH64_createState());
  XXH64_reset(state.get(), 0);
  for (const std::string& module : modules) {
    for (const std::string_view suffix : {".weight_packed", ".weight_scale"}) {
      NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* tensor,
                              weights.require(module + std::string(suffix)));
      XXH64_update(state.get(), tensor->name.data(), tensor->name.size());
      add_ends(tensor->data, state.get());
    }
  }
  return fmt::format("{:016x}", XXH64_digest(state.get()));
}

}  // namespace nibble
