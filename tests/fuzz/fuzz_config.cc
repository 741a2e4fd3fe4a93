#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "arch/config.h"
#include "base/check.h"
#include "model/rope_frequencies.h"

// config.json, and after a zero byte generation_config.json. Any text either is refused, or gives
// facts that the loader can use as they are.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t split = std::min(text.find('\0'), text.size());
  const auto config = nibble::parse_model_config(
      {.text = text.substr(0, split),
       .generation_text = text.substr(std::min(split + 1, text.size()))});
  if (!config.ok()) {
    CHECK(!config.status().message().empty());
    return 0;
  }
  CHECK_EQ(static_cast<int64_t>(config->sliding_windows.size()), config->num_layers);
  CHECK_EQ(config->num_heads % config->num_kv_heads, 0);
  CHECK(std::ranges::all_of(config->sliding_windows, [](int64_t window) { return window >= 0; }));
  CHECK(std::ranges::all_of(config->eos_token_ids,
                            [&](int64_t id) { return id >= 0 && id < config->vocab_size; }));
  CHECK(config->max_position >= 1 && config->max_position < int64_t{1} << 31);
  const nibble::RopeFrequencies table =
      nibble::compute_rope_frequencies(config->rope, config->head_dim);
  CHECK(std::isfinite(table.attention_factor));
  CHECK(std::ranges::all_of(table.inv_freq, [](float value) { return std::isfinite(value); }));
  CHECK(std::isfinite(nibble::base_growth(table.dynamic, config->max_position)));
  return 0;
}
