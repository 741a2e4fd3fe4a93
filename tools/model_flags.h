#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "engine/session.h"

namespace nibble {

/// Flags of every command that runs a model by itself.
struct ModelFlags {
  std::string model_dir;
  std::string kv_cache_dtype = "auto";
  int threads = 0;
  std::string isa = "auto";
  bool exact_activations = false;
  bool ignore_fmpq = false;
  std::vector<std::string> kernels;
  std::string device = "auto";
  std::string cuda_library;
  bool one_stream = false;  // no CudaBackendOptions::branch_steps
  Pinning pinning = Pinning::kOff;
  NumaMode numa = NumaMode::kAuto;
};

/// Flags that shape an answer; what is not given follows the model's generation_config.json.
struct AnswerFlags {
  int64_t max_tokens = 0;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
};

/// Adds MODEL, --kv-cache-dtype and the flags of kernels, threads and devices; `flags` must outlive
/// `command`.
void add_model_flags(CLI::App& command, ModelFlags& flags);
/// The same without MODEL, for commands that take several.
void add_run_flags(CLI::App& command, ModelFlags& flags);
/// Adds --max-tokens (with this default), the sampling flags, --seed and --stop.
void add_answer_flags(CLI::App& command, AnswerFlags& flags, int64_t max_tokens);

/// Where --threads, --pin and --numa go.
struct ThreadFlags {
  int& threads;
  Pinning& pinning;
  NumaMode& numa;
};

/// Adds --threads, --pin and --numa; what `flags` refers to must outlive `command`.
void add_thread_flags(CLI::App& command, const ThreadFlags& flags);
/// Adds --isa and --exact-activations.
void add_kernel_flags(CLI::App& command, std::string& isa, bool& exact_activations);

/// Adds --ignore-fmpq.
void add_fmpq_flag(CLI::App& command, bool& ignore_fmpq);

/// Adds --kernel.
void add_kernel_choice(CLI::App& command, std::vector<std::string>& kernels);
/// Adds --device and --cuda-library.
void add_device_flags(CLI::App& command, std::string& device, std::string& cuda_library);
/// The backend that the flags ask for.
BackendOptions backend_of(const ModelFlags& flags);

/// Opens the model for one conversation at a time.
Result<ServingSession> open_session(const ModelFlags& flags);
/// Sampling as the flags say, else as the model says, else at `fallback_temperature`.
SamplingParams sampling_of(const AnswerFlags& flags,
                           const ModelConfig& config,
                           double fallback_temperature);

}  // namespace nibble
