#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/calibration_math.h"
#include "backend/prepared_experts.h"
#include "backend/prepared_gemm.h"
#include "backend/prepared_heads.h"
#include "backend/step.h"
#include "base/cpu_topology.h"
#include "core/device_buffer.h"
#include "core/expert_counts.h"
#include "quant/act_spec.h"
#include "quant/quant_view.h"

namespace nibble {

/// A table [rows, width] of a model: of its tokens, or of its positions.
class PreparedTable {
 public:
  virtual ~PreparedTable() = default;
  [[nodiscard]] virtual int64_t rows() const = 0;
  [[nodiscard]] virtual int64_t width() const = 0;
  /// out[r] = table[token of row r] as f32, [step.rows(), width()]. Ids must be in 0..rows()-1.
  virtual void gather(const Step& step, float* out) const = 0;
  /// out[r] += table[first + position of row r], [step.rows(), width()]; a row's position is its
  /// place in its sequence (SequenceSpan), and must be below rows() - first.
  virtual void add_positions(const Step& step, int64_t first, float* out) const = 0;
};

/// Kernels of one device. Chosen once, passed to layers, never global. Calls are made by one thread
/// at a time and take effect in their order; on CPUs each splits its work over the backend's own
/// threads and returns when it is done, on GPUs only read() and finish_step() wait. Pointers are to
/// the backend's memory unless a parameter is a span.
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;  // "cpu/avx512"
  [[nodiscard]] virtual int threads() const = 0;

  /// Type of the activations between the parts of a layer (results of qkv and gate_up products,
  /// rotated queries, results of attention) of a model whose dtype is `model`: BF16 for BF16
  /// models, which were trained with it. The residual stream and logits are F32 everywhere.
  [[nodiscard]] virtual DType activation_type(DType model) const {
    return model == DType::kBF16 ? DType::kBF16 : DType::kF32;
  }
  /// Whether the backend's memory is the host's.
  [[nodiscard]] virtual bool host_memory() const { return true; }
  /// Bytes that are free in the backend's memory; 0 where that is the host's.
  [[nodiscard]] virtual int64_t free_memory() const { return 0; }
  /// Uninitialised. kResourceExhausted, naming the size.
  virtual Result<DeviceBuffer> allocate(size_t bytes);
  /// A copy of `values`.
  virtual Result<DeviceBuffer> upload(std::span<const float> values);
  /// Copies to the host what earlier calls left at `from`.
  virtual void read(const float* from, std::span<float> to);
  /// Bytes of one page of one layer's cache.
  [[nodiscard]] virtual int64_t kv_page_bytes(const KvView& shape) const {
    return shape.page_bytes();
  }
  /// Tokens of a page where nobody says otherwise.
  [[nodiscard]] virtual int64_t preferred_page_size(KvCode code) const {
    return kv_has_residual(code) ? kChannelTokens : 16;
  }
  /// kUnsupported, with the remedy, for a cache of this shape that there are no kernels for.
  [[nodiscard]] virtual Status check_kv(const KvView& /*shape*/, int64_t /*heads*/) const {
    return {};
  }
  /// `table` must not be quantized; `owner` keeps its memory.
  virtual Result<std::unique_ptr<PreparedTable>> prepare_table(
      const QuantView& table, std::shared_ptr<const void> owner) = 0;

  /// A number for StepPlan that nobody has had: of a model with its cache.
  int64_t new_program() { return ++programs_; }
  /// Bytes that the backend takes for steps of these sizes beside what it is asked to allocate, as
  /// far as they grow with the rows.
  [[nodiscard]] virtual int64_t step_bytes(const StepLimits& /*limits*/) const { return 0; }
  /// Sizes what run_step() needs; called once, before it and after the products of a model are
  /// prepared. kInvalidArgument for a kernel that was asked for and takes none of them.
  virtual Status prepare_steps(const StepLimits& limits) = 0;
  /// Runs a step: calls `layers`, which issues its work. A backend may record that for a size and
  /// repeat the record for later steps of the size instead: for one program it must depend on
  /// nothing but step.rows(), step.logit_rows() and what kinds of sampling the plan has.
  virtual void run_step(const StepPlan& plan, const StepLayers& layers) = 0;
  /// Whether a plan may say how tokens are sampled, and steps may be fed.
  [[nodiscard]] virtual bool samples_tokens() const { return false; }
  /// Whether the first steps of a size take longer than later ones, as kernels are loaded for them.
  [[nodiscard]] virtual bool first_steps_are_slow() const { return false; }
  /// Waits for the tokens of the earliest sampling step that has not been finished; of two at most.
  ///   out: one for each of its logit rows
  virtual void finish_step(std::span<SampledRow> out);

  /// kUnsupported, with the reason and a remedy, for weights and activations that prepare_gemm()
  /// has no kernel for.
  [[nodiscard]] virtual Status check_gemm(const WeightFormat& format,
                                          const ActSpec& act,
                                          int64_t k) const = 0;
  /// kUnsupported, with the reason and a remedy, where it does not turn rows of k numbers behind
  /// activations (GemmInput::turn).
  [[nodiscard]] virtual Status check_turn(int64_t /*turn*/, int64_t /*k*/) const { return {}; }
  /// Packs the rows of several matrices of one format and k, one below the other, for rows of
  /// activations as `act` says. max_m is the largest m that run() will see (workspace is sized
  /// here).
  virtual Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                             const ActSpec& act,
                                                             int64_t max_m) = 0;
  /// The same for one matrix.
  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(const QuantTensor& weight,
                                                     const ActSpec& act,
                                                     int64_t max_m) {
    const QuantView view = view_of(weight);
    return prepare_gemm({&view, 1}, act, max_m);
  }

  /// Packs a matrix for each head of an attention layer, all of one format, [n, k] each.
  virtual Result<std::unique_ptr<PreparedHeads>> prepare_heads(std::span<const QuantView> heads,
                                                               const ActSpec& act,
                                                               int64_t max_m);

  /// Packs the experts of a layer. The errors of check_experts(), and kUnsupported, with the reason
  /// and a remedy, for experts that there are no kernels for.
  virtual Result<std::unique_ptr<PreparedExperts>> prepare_experts(const ExpertsRequest& request);
  /// Of all runs of prepared experts so far. Rows that a step has beside its input's are counted as
  /// well. GPUs count by themselves: where there are experts, this waits for what is under way.
  [[nodiscard]] virtual ExpertCounts expert_counts() const { return {}; }

  /// What calibrates on a device beside steps. kUnsupported where the backend's memory is the
  /// host's, which needs no such thing; the errors of the device.
  virtual Result<std::unique_ptr<CalibrationMath>> calibration_math();

  /// x[i] rounded to BF16, ties to even, in place.
  virtual void round_bf16(float* x, int64_t count) = 0;

 private:
  int64_t programs_ = 0;
};

/// What happens to a number of threads that is larger than the CPUs that the process may use.
enum class ThreadLimit : uint8_t {
  kUsableCpus,  // it is lowered, with a warning in the log: such threads only wait for each other
  kNone,        // it is taken, for tests of the distribution of work
};

struct CpuBackendOptions {
  int threads = 0;           // 0: one per core this process may use; not more than it has CPUs
  std::string isa = "auto";  // auto, or a name of cpu::supported_isas()
  Pinning pinning = Pinning::kOff;
  NumaMode numa = NumaMode::kAuto;
  ThreadLimit limit = ThreadLimit::kUsableCpus;
  // BF16 activations of INT4 weights in groups are not rounded to fixed point within a group.
  bool exact_activations = false;
  // Names of kernels that products which they accept take, first names first: see KernelChoice.
  std::vector<std::string> kernels;
};

/// The CPU backend. kUnsupported, with the list of what the machine has, when it lacks the ISA.
Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuBackendOptions& options);

}  // namespace nibble
