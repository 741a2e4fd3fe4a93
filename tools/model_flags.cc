#include "model_flags.h"

#include "flag_checks.h"

namespace nibble {

void add_thread_flags(CLI::App& command, const ThreadFlags& flags) {
  command
      .add_option("--threads", flags.threads,
                  "Computing threads; 0: one per core; at most the CPUs that are allowed")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  command.add_flag_callback(
      "--pin", [&pinning = flags.pinning] { pinning = Pinning::kCores; },
      "Hold every computing thread to a core of its own");
  command
      .add_option_function<std::string>(
          "--numa",
          [&numa = flags.numa](const std::string& mode) {
            numa = mode == "off" ? NumaMode::kOff : NumaMode::kAuto;
          },
          "auto spreads threads and weights evenly over the memory nodes; off leaves it to the "
          "system")
      ->check(CLI::IsMember({"auto", "off"}))
      ->default_str("auto");
}

void add_kernel_flags(CLI::App& command, std::string& isa, bool& exact_activations) {
  command.add_option("--isa", isa, "Instruction set of the kernels")
      ->check(CLI::IsMember({"auto", "scalar", "avx2", "avx2_vnni", "avx512_bw", "avx512", "amx"}))
      ->capture_default_str();
  command.add_flag(
      "--exact-activations", exact_activations,
      "On CPUs, multiply INT4 weights in groups with BF16 activations as they are, not "
      "rounded to 2^-14 of the largest in a group: slower");
}

void add_kernel_choice(CLI::App& command, std::vector<std::string>& kernels) {
  command
      .add_option("--kernel", kernels,
                  "Kernel of the matrix products that it accepts, instead of the device's own "
                  "choice, like gemm_w4a16_avx512; a wrong name lists all (may be repeated: first "
                  "names first)")
      ->delimiter(',')
      ->allow_extra_args(false);
}

void add_device_flags(CLI::App& command, std::string& device, std::string& cuda_library) {
  command
      .add_option("--device", device,
                  "Computes: cpu, cuda or cuda:N; auto is the first GPU that can be used, else cpu")
      ->capture_default_str();
  command.add_option("--cuda-library", cuda_library,
                     "Path of libnibble_cuda.so (default: beside the program, or in ../lib)");
}

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  command.add_option("MODEL", flags.model_dir, "Model folder in Hugging Face format")->required();
  add_run_flags(command, flags);
}

void add_fmpq_flag(CLI::App& command, bool& ignore_fmpq) {
  command.add_flag(
      "--ignore-fmpq", ignore_fmpq,
      "Leave activations as they are where the model's nibble_fmpq.json rounds them to "
      "4 and 8 bits: its weights alone are quantized then");
}

void add_run_flags(CLI::App& command, ModelFlags& flags) {
  command
      .add_option("--kv-cache-dtype", flags.kv_cache_dtype,
                  "Keys and values are kept in this type (auto: what the checkpoint's type "
                  "needs, bf16 for BF16 and f32 for F16 and F32)")
      ->check(CLI::IsMember(kv_cache_dtypes()))
      ->capture_default_str();
  add_thread_flags(command, {flags.threads, flags.pinning, flags.numa});
  add_kernel_flags(command, flags.isa, flags.exact_activations);
  add_fmpq_flag(command, flags.ignore_fmpq);
  add_kernel_choice(command, flags.kernels);
  add_device_flags(command, flags.device, flags.cuda_library);
}

void add_answer_flags(CLI::App& command, AnswerFlags& flags, int64_t max_tokens) {
  flags.max_tokens = max_tokens;
  command.add_option("--max-tokens", flags.max_tokens, "Longest answer, in tokens")
      ->check(whole_number(1))
      ->capture_default_str();
  command.add_option("--temperature", flags.temperature,
                     "Randomness; 0 always takes the likeliest token");
  command.add_option("--top-p", flags.top_p,
                     "Draw from the likeliest tokens with this probability");
  command.add_option("--top-k", flags.top_k, "Draw from this many likeliest tokens; 0: all")
      ->check(whole_number(0));
  command.add_option("--min-p", flags.min_p,
                     "Draw from tokens at least this likely, relative to the likeliest");
  command.add_option("--repetition-penalty", flags.repetition_penalty,
                     "Above 1: makes tokens of prompt and answer less likely");
  command.add_option("--seed", flags.seed, "The same seed gives the same answer")
      ->check(whole_number(0));
  command.add_option("--stop", flags.stop, "End the answer before this text (may be repeated)")
      ->allow_extra_args(false)
      ->check(not_empty("would end every answer at once; leave the flag out"));
}

BackendOptions backend_of(const ModelFlags& flags) {
  return {.device = flags.device,
          .cpu = {.threads = flags.threads,
                  .isa = flags.isa,
                  .pinning = flags.pinning,
                  .numa = flags.numa,
                  .exact_activations = flags.exact_activations},
          .cuda = {.branch_steps = !flags.one_stream},
          .kernels = flags.kernels,
          .cuda_library = flags.cuda_library};
}

Result<ServingSession> open_session(const ModelFlags& flags) {
  SessionOptions options;
  options.backend = backend_of(flags);
  options.engine.max_num_seqs = 1;
  options.engine.ignore_fmpq = flags.ignore_fmpq;
  NIBBLE_ASSIGN_OR_RETURN(options.kv_code, parse_kv_cache_dtype(flags.kv_cache_dtype));
  return open_session(flags.model_dir, options);
}

SamplingParams sampling_of(const AnswerFlags& flags,
                           const ModelConfig& config,
                           double fallback_temperature) {
  SamplingParams out = default_sampling(config, {.temperature = fallback_temperature});
  out.temperature = flags.temperature.value_or(out.temperature);
  out.top_p = flags.top_p.value_or(out.top_p);
  out.top_k = flags.top_k.value_or(out.top_k);
  out.min_p = flags.min_p.value_or(out.min_p);
  out.repetition_penalty = flags.repetition_penalty.value_or(out.repetition_penalty);
  out.seed = flags.seed;
  return out;
}

}  // namespace nibble
