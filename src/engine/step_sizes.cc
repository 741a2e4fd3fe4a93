#include "engine/step_sizes.h"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>

namespace nibble {
namespace {

struct Row {
  Preference preference;
  std::string_view name;
  StepSizes cpu, gpu;
};

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// GPUs: an H200 decodes Llama 3.1 8B (w4a8, contexts of 1008) with 506 tokens a second for one
// sequence, 13,583 for 64 and 19,349 for 256, and prefills 62,570 tokens a second in steps of 8192
// (bench/results/h200-models.json); 512 sequences and 16,384 tokens halve what is left of each
// step's fixed costs. A token of a prompt takes it 16 to 27 us and one that is decoded 52 to 62, so
// 1024 of a prompt make a step of 256 decodes (13 to 16 ms) about three times as long. CPUs: their
// products reach their speed with a few tiles of 16 rows, so longer steps only make others wait.
constexpr std::array kRows = {
    Row{Preference::kTtft, "ttft", {64, 512, kAny}, {256, 8192, kAny}},
    Row{Preference::kTpot, "tpot", {64, 512, 64}, {256, 8192, 1024}},
    Row{Preference::kThroughput, "throughput", {128, 2048, kAny}, {512, 16384, kAny}},
};

const Row& row_of(Preference preference) {
  return *std::ranges::find(kRows, preference, &Row::preference);
}

}  // namespace

std::vector<std::string> preference_names() {
  std::vector<std::string> names;
  names.reserve(kRows.size());
  for (const Row& row : kRows) {
    names.emplace_back(row.name);
  }
  return names;
}

std::string_view preference_name(Preference preference) { return row_of(preference).name; }

Result<Preference> parse_preference(std::string_view name) {
  const auto* const row = std::ranges::find(kRows, name, &Row::name);
  if (row == kRows.end()) {
    return make_error(StatusCode::kInvalidArgument, "--prefer is '{}', but must be one of {}", name,
                      fmt::join(preference_names(), ", "));
  }
  return row->preference;
}

StepSizes preferred_sizes(Preference preference, StepDevice device) {
  const Row& row = row_of(preference);
  return device == StepDevice::kGpu ? row.gpu : row.cpu;
}

bool halve(StepSizes& sizes) {
  const StepSizes least = preferred_sizes(Preference::kTtft, StepDevice::kCpu);
  if (sizes.max_num_batched_tokens > least.max_num_batched_tokens) {
    sizes.max_num_batched_tokens /= 2;
    return true;
  }
  if (sizes.max_num_seqs > least.max_num_seqs) {
    sizes.max_num_seqs /= 2;
    return true;
  }
  return false;
}

}  // namespace nibble
