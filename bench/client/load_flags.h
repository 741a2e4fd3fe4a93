#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "bench/client/arrivals.h"
#include "bench/client/load_metrics.h"
#include "bench/client/prompts.h"
#include "bench/client/target.h"

namespace nibble {

/// The flags of `nibble bench serve`.
struct LoadFlags {
  std::string base_url;
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  std::string backend = "openai";
  std::string endpoint;
  std::string model;
  std::string tokenizer;
  std::string api_key;
  std::vector<std::string> headers;
  double ready_s = 600;
  double stall_s = 600;
  double connect_s = 10;

  std::string dataset = "random";
  std::string dataset_path;
  int64_t num_prompts = 1000;
  int64_t input_len = 1024;
  int64_t output_len = 128;
  double range_ratio = 0;
  std::string range_semantics;  // "": the layout's
  int64_t prefix_len = 0;
  std::string prompt_form = "text";
  int64_t vocab_size = 0;
  int64_t fixed_output = 0;
  uint64_t seed = 0;
  std::string gsm8k_examples;
  int64_t fewshot = 5;

  std::string request_rate = "inf";
  double burstiness = 1;
  std::string ramp_up;
  double ramp_start = 0;
  double ramp_end = 0;
  int64_t max_concurrency = 0;
  int64_t num_warmups = 0;

  bool ignore_eos = false;
  bool disable_ignore_eos = false;
  std::optional<double> temperature;
  std::string extra_body;

  std::string layout = "vllm";
  std::string percentile_metrics = "ttft,tpot,itl,e2el";
  std::string percentiles = "99";
  std::vector<std::string> goodput;
  std::string result_file;
  bool save_detailed = false;
  std::string report;
  std::string sweep;
  std::vector<std::string> compare;
  int64_t rounds = 5;
  bool json = false;
};

/// Adds them; `flags` must outlive `command`.
void add_load_flags(CLI::App& command, LoadFlags& flags);

/// What the flags mean together.
struct LoadOptions {
  TargetOptions target;  // base_url is that of the only server, or of none with --compare
  BodyOptions body;
  ArrivalOptions arrivals;
  Goodput goodput;
  LoadTiming layout = LoadTiming::kVllm;
  RangeSemantics semantics = RangeSemantics::kVllm;
  std::vector<std::string> percentile_metrics;
  std::vector<double> percentiles;
};

/// kInvalidArgument naming the flag at fault.
Result<LoadOptions> read_load_flags(const LoadFlags& flags);

/// A number above 0, or "inf".
Result<double> parse_rate(std::string_view flag, const std::string& text);

/// The parts of a list "a,b".
[[nodiscard]] std::vector<std::string> split_list(std::string_view text);

}  // namespace nibble
