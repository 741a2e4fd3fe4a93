#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "quantizer/quantize.h"

namespace nibble {

inline constexpr const char* kStoryteller = "models/storyteller";

/// Folder of the storyteller in `scheme`, quantized now; in "bf16" it is as it comes.
inline std::string storyteller_in(const std::string& scheme) {
  if (scheme == "bf16") {
    return kStoryteller;
  }
  // Shards of the tests run beside each other.
  const char* shard = std::getenv("GTEST_SHARD_INDEX");
  const auto folder = std::filesystem::temp_directory_path() /
                      fmt::format("nibble_cuda_test_{}_{}", scheme, shard == nullptr ? "0" : shard);
  QuantizeOptions options;
  options.source = kStoryteller;
  options.destination = folder;
  options.plan.rules.scheme = find_scheme(scheme).value();
  options.existing = ExistingOutput::kReplace;
  const auto report = quantize_checkpoint(options);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return folder;
}

}  // namespace nibble
