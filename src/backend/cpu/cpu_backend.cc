#include <algorithm>

#include "backend/backend.h"
#include "backend/cpu/cpu_attention.h"
#include "backend/cpu/cpu_gemm.h"
#include "backend/cpu/cpu_table.h"
#include "backend/cpu/isa.h"
#include "base/log.h"

namespace nibble {
namespace cpu {
namespace {

constexpr int64_t kRoundedPiece = 4096;  // elements of one task of round_bf16()

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& kernels, const ThreadPlan& plan, bool exact)
      : kernels_(kernels), name_(fmt::format("cpu/{}", kernels.name)), exact_(exact), pool_(plan) {}

  Status allocate_scratch() { return attention_.allocate_scratch(); }

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] int threads() const override { return pool_.threads(); }

  [[nodiscard]] Status check_gemm(const WeightFormat& format,
                                  const ActSpec& act,
                                  int64_t k) const override {
    return check_formats(format, act.format, k);
  }

  Result<std::unique_ptr<PreparedGemm>> prepare_gemm(std::span<const QuantView> parts,
                                                     const ActSpec& act,
                                                     int64_t max_m) override {
    return CpuGemm::create(parts, act, max_m, kernels_, weights_, workspace_, exact_);
  }

  Result<std::unique_ptr<PreparedTable>> prepare_table(const QuantView& table,
                                                       std::shared_ptr<const void> owner) override {
    return std::unique_ptr<PreparedTable>(std::make_unique<CpuTable>(table, std::move(owner)));
  }

  void round_bf16(float* x, int64_t count) override {
    const int64_t pieces = (count + kRoundedPiece - 1) / kRoundedPiece;
    for_rows(pool_, pieces, kRoundedPiece, [&](int64_t piece, int) {
      const int64_t begin = piece * kRoundedPiece;
      kernels_.round_bf16(x + begin, std::min(kRoundedPiece, count - begin), x + begin);
    });
  }

  void rope_append_kv(const RopeAppendArgs& args) override { attention_.rope_append_kv(args); }
  void attention(const AttentionArgs& args) override { attention_.attention(args); }

 private:
  const KernelTable& kernels_;
  std::string name_;
  bool exact_;  // see CpuBackendOptions
  ThreadPool pool_;
  BufferArena weights_;
  Workspace workspace_{pool_};
  CpuAttention attention_{kernels_, pool_};
};

}  // namespace
}  // namespace cpu

namespace {

ThreadPlan plan_of(const CpuBackendOptions& options) {
  const CpuTopology topology = read_cpu_topology();
  ThreadOptions wanted{
      .threads = options.threads, .pinning = options.pinning, .numa = options.numa};
  const int most = topology.usable_cpus();
  if (options.limit == ThreadLimit::kUsableCpus && wanted.threads > most) {
    NIBBLE_LOG(kWarning, "{} threads were asked for, but this process may use {} CPUs{}: taking {}",
               wanted.threads, most,
               topology.quota == most ? " (the quota of its control group)" : "", most);
    wanted.threads = most;
  }
  return plan_threads(topology, wanted);
}

}  // namespace

Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuBackendOptions& options) {
  if (options.threads < 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "threads is {}; give 0 for all cores, or a count", options.threads);
  }
  const cpu::CpuFeatures features = cpu::detect_cpu_features();
  NIBBLE_ASSIGN_OR_RETURN(const auto* kernels, cpu::find_kernels(options.isa, features));
  if (options.isa == "auto") {
    cpu::log_missing(features, kernels->name);
  }
  auto backend =
      std::make_unique<cpu::CpuBackend>(*kernels, plan_of(options), options.exact_activations);
  NIBBLE_RETURN_IF_ERROR(backend->allocate_scratch());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace nibble
