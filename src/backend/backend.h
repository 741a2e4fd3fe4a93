#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "backend/kernel_bench.h"
#include "base/cpu_topology.h"
#include "base/json.h"
#include "core/device_buffer.h"
#include "ops/attention.h"
#include "ops/gemm.h"
#include "ops/picks.h"
#include "quant/quant_view.h"

namespace nibble {

/// A weight matrix packed for one kernel. Owned by the layer that uses it.
class PreparedGemm {
 public:
  virtual ~PreparedGemm() = default;
  /// Runs one step's product. Allocates nothing.
  virtual void run(const GemmArgs& args) = 0;
  /// The weights in canonical form again: packing is invertible.
  [[nodiscard]] virtual Result<QuantTensor> unpack() const = 0;
  /// Replaces the weights in place (same format and shape, same memory).
  virtual Status update(const QuantTensor& weight) = 0;
  [[nodiscard]] virtual std::string_view kernel_name() const = 0;  // "gemm_w4a16_avx512"
  [[nodiscard]] virtual int64_t weight_bytes() const = 0;          // read per run at m = 1
};

/// What a step works on; row r of its activations belongs to tokens[r].
struct StepInput {
  std::span<const int32_t> tokens;
  std::span<const SequenceSpan> sequences;
  std::span<const int32_t> logit_rows;  // rows whose logits are wanted
  int64_t page_size = 0;                // tokens of a page of the cache
  bool fed = false;  // tokens are what the step before picked, row by row; `tokens` says how many
};

/// Rows that the layers of a step compute: those of its input, or more on devices that record the
/// work of a step for a few sizes only. What is in the rows past the input's is nobody's concern.
struct StepShape {
  int64_t rows = 0;
  int64_t logit_rows = 0;
};

/// Sizes of the largest step.
struct StepLimits {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t positions = 0;  // of one sequence
};

/// A table [rows, width] of a model: of its tokens, or of its positions.
class PreparedTable {
 public:
  virtual ~PreparedTable() = default;
  [[nodiscard]] virtual int64_t rows() const = 0;
  [[nodiscard]] virtual int64_t width() const = 0;
  /// out[r] = table[tokens[r]] as f32, [tokens, width()]. Ids must be in 0..rows()-1.
  virtual void gather(const StepInput& input, const StepShape& shape, float* out) const = 0;
  /// out[r] += table[first + position of row r], [tokens, width()]; a row's position is its place
  /// in its sequence (SequenceSpan), and must be below rows() - first.
  virtual void add_positions(const StepInput& input,
                             const StepShape& shape,
                             int64_t first,
                             float* out) const = 0;
};

/// Kernels of one device. Chosen once, passed to layers, never global. Calls are made by one thread
/// at a time and take effect in their order; on CPUs each splits its work over the backend's own
/// threads and returns when it is done, on GPUs only read() and run_step()'s end wait. Pointers are
/// to the backend's memory unless a parameter is a span.
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
  /// Of devices other than the CPU (whose benchmarks are programs of their own): GB/s at which the
  /// device reads its memory; and {"ceilings", "kernels"} of its matrix products.
  virtual Result<double> measure_read_gbps();
  virtual Result<Json> bench_kernels(const KernelBenchOptions& options);
  /// Uninitialised. kResourceExhausted, naming the size.
  virtual Result<DeviceBuffer> allocate(size_t bytes);
  /// A copy of `values`.
  virtual Result<DeviceBuffer> upload(std::span<const float> values);
  /// Whether steps may pick their tokens, by the three calls that follow, and may be fed.
  [[nodiscard]] virtual bool picks_tokens() const { return false; }
  /// How the tokens of the step that run_step() runs next are picked.
  virtual void start_picks(const PickInput& input);
  /// Within run_step(): picks a token from each row of logits [rows, vocab], as Sampler does; they
  /// are overwritten.
  virtual void pick_tokens(float* logits, int64_t vocab);
  /// Waits for the picks of the earliest step that has not been finished; of two at most.
  virtual void finish_picks(std::span<PickedRow> out);
  /// Copies to the host what earlier calls left at `from`.
  virtual void read(const float* from, std::span<float> to);
  /// Bytes of one page of one layer's cache.
  [[nodiscard]] virtual int64_t kv_page_bytes(const KvView& shape) const {
    return shape.page_bytes();
  }
  /// Tokens of a page where nobody says otherwise.
  [[nodiscard]] virtual int64_t preferred_page_size(KvCode /*code*/) const { return 16; }
  /// kUnsupported, with the remedy, for a cache of this shape that there are no kernels for.
  [[nodiscard]] virtual Status check_kv(const KvView& shape, int64_t heads) const;
  /// `table` must not be quantized; `owner` keeps its memory.
  virtual Result<std::unique_ptr<PreparedTable>> prepare_table(
      const QuantView& table, std::shared_ptr<const void> owner) = 0;

  /// A number for run_step() that nobody has had: of a model with its cache.
  int64_t new_program() { return ++programs_; }
  /// Sizes what run_step() needs; called once, before it.
  virtual Status prepare_steps(const StepLimits& limits);
  /// Calls `layers`, which issues the calls below for one step. A backend may record them for a
  /// shape and repeat the record for later inputs of that shape instead: for one `program` they
  /// must depend on nothing but the shape.
  virtual void run_step(const StepInput& input,
                        int64_t program,
                        const std::function<void(const StepShape&)>& layers);

  /// kUnsupported, with the reason and a remedy, for weights and activations that prepare_gemm()
  /// has no kernel for.
  [[nodiscard]] virtual Status check_gemm(const WeightFormat& format,
                                          ActFormat act,
                                          int64_t k) const = 0;
  /// Packs the rows of several matrices of one format and k, one below the other, for rows of
  /// activations in `act`. max_m is the largest m that run() will see (workspace is sized here).
  virtual Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                             ActFormat act,
                                                             int64_t max_m) = 0;
  /// The same for one matrix.
  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(const QuantTensor& weight,
                                                     ActFormat act,
                                                     int64_t max_m) {
    const QuantView view = view_of(weight);
    return prepare_gemm({&view, 1}, act, max_m);
  }

  /// to[i] = from[input.logit_rows[i]], rows of width.
  virtual void pick_rows(
      const StepInput& input, const StepShape& shape, const float* from, int64_t width, float* to);
  /// x[i] rounded to BF16, ties to even, in place.
  virtual void round_bf16(float* x, int64_t count) = 0;
  virtual void rope_append_kv(const RopeAppendArgs& args) = 0;
  virtual void attention(const AttentionArgs& args) = 0;

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
};

/// The CPU backend. kUnsupported, with the list of what the machine has, when it lacks the ISA.
Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuBackendOptions& options);

}  // namespace nibble
