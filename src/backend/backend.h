#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/cpu_topology.h"
#include "ops/attention.h"
#include "ops/gemm.h"
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

/// Kernels of one device. Chosen once, passed to layers, never global. Calls are made by one thread
/// at a time; each splits its work over the backend's own threads and returns when it is done.
class Backend {
 public:
  virtual ~Backend() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;  // "cpu/avx512"
  [[nodiscard]] virtual int threads() const = 0;

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

  /// y[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight, rows of n; x may equal y.
  virtual void rms_norm(
      const float* x, int64_t rows, int64_t n, const float* weight, float eps, float* y) = 0;
  /// y[r, i] += bias[i], rows of n.
  virtual void add_bias(float* y, int64_t rows, int64_t n, const float* bias) = 0;
  /// x[i] rounded to BF16, ties to even, in place.
  virtual void round_bf16(float* x, int64_t count) = 0;
  virtual void rope_append_kv(const RopeAppendArgs& args) = 0;
  virtual void attention(const AttentionArgs& args) = 0;
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
};

/// The CPU backend. kUnsupported, with the list of what the machine has, when it lacks the ISA.
Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuBackendOptions& options);

}  // namespace nibble
